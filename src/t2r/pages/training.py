"""The sections of a conversion or a pretraining. That of a conversion begins with what was lost and what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from t2r.config import GUARD, OPTIONS
from t2r.errors import T2RError
from t2r.evaluation.inputs import positions_of
from t2r.hub import load_config
from t2r.pages.plans import plan
from t2r.reporting.inspection import human, lengths_within, memory_by_length
from t2r.reporting.page import Page, lines
from t2r.storage import kind_of, parse_json, parse_yaml, read_inside
from t2r.tasks import Translation
from t2r.training.sessions.session import table_of
from t2r.words import counted

SIZES = (
    "model_type", "num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers", "hidden_size",
    "n_embd", "d_model", "num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "vocab_size", "dtype",
)  # fmt: skip
"""Names of sizes in configurations of transformers."""
MINE = "this model"
SINKS = 4
"""First tokens that remain visible in the suggested window."""

Row = tuple[str, str, str, str]
"""What is compared, the teacher's value, this model's, and their difference."""


def training(page: Page, results: Mapping[str, Any], path: Path) -> None:
    """Add a conversion or a pretraining: the answers, samples, the way there, configuration, data, machine."""
    compared = "teacher" in results
    if told := outcome(results):
        page.paragraph(told, lead=True)
    if advice := results.get("advice"):
        page.paragraph(f"{advice[0].upper()}{advice[1:]}.")
    if compared:
        answers(page, dict(results) | {"memory": results.get("memory") or memory_of(path)})
        samples(page, results)
    if results.get("teacher" if compared else "untrained"):
        page.subheading("Stages")
        page.table(*table_of(dict(results), compared=compared))
    curves(page, {name: log for name, log in (results.get("log") or {}).items() if log}, recipe_of(path))
    if results.get("planned"):
        plan(page, results["planned"])
    if results.get("sensitivity"):
        page.subheading("Sensitivity")
        rows = [(str(layer), f"{cost:+.4f}") for layer, cost in results["sensitivity"]]
        page.table(("layer", "increase in loss"), rows, "The loss if only this layer is recurrent")
    data(page, results)
    if kind_of(path) == "folder":
        configuration(page, path)
    made(page, results.get("made"))


# --- The answers --------------------------------------------------------------------------------------------


def last_scores(results: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(reversed(list(results["stages"].values())), results.get("swapped")) or {}


def outcome(results: Mapping[str, Any]) -> str | None:
    """Return the quality in a sentence, for the top of the page."""
    for name, before, after, gap in quality_rows(results)[:1]:
        against = f", {gap} against the teacher's {before}" if gap else ""
        return f"{name[0].upper()}{name[1:]} {after}{against}."
    return None


def answers(page: Page, results: Mapping[str, Any]) -> None:
    """Add a table of what was lost and what was saved, with notes on how it was measured."""
    rows = [*quality_rows(results), *memory_rows(results), *speed_rows(results), *recall_rows(results)]
    if rows:
        page.table(("", "teacher", MINE, "difference"), rows)
    for note in notes(results):
        page.paragraph(note)


def quality_rows(results: Mapping[str, Any]) -> list[Row]:
    teacher, last = results.get("teacher") or {}, last_scores(results)
    rows: list[Row] = []
    for name, words in (("perplexity", "perplexity"), ("bleu", "BLEU"), ("chrf", "chrF")):
        before, after = teacher.get(name), last.get(name)
        if after is not None:
            gap = "" if not before else f"{after - before:+.2f}"
            if gap and name == "perplexity":
                gap = f"{100 * (after / before - 1):+.1f} %"
            rows.append((words, "" if before is None else f"{before:.2f}", f"{after:.2f}", gap))
    if rows and last.get("kl") is not None:
        rows.append(("KL to the teacher, nats per token", "", f"{last['kl']:.4f}", ""))
    return rows


def memory_rows(results: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for row in results.get("memory") or ():
        before, after = row["teacher"], row["model"]
        saved = f"{before / after:.1f}\u00d7 less" if after <= before else f"{after / before:.1f}\u00d7 more"
        rows.append((f"memory of a sequence, {row['tokens']:,} tokens", human(before), human(after), saved))
    return rows


def speed_rows(results: Mapping[str, Any]) -> list[Row]:
    where = "in lines of" if results.get("task") == Translation.name else "after"
    rows: list[Row] = []
    for point in (results.get("speed") or {}).get("points", ()):
        before, after = point["teacher"], point["model"]
        words = f"tokens per second, {where} {point['tokens']:,} tokens"
        rows.append((words, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}\u00d7"))
    return rows


def recall_rows(results: Mapping[str, Any]) -> list[Row]:
    before = {row["distance"]: row for row in results.get("teacher_recall") or ()}
    rows: list[Row] = []
    for row in results.get("recall") or ():
        teacher = before.get(row["distance"])
        points = 0 if teacher is None else round(100 * (row["accuracy"] - teacher["accuracy"]))
        gap = "" if not points else f"{points:+d} points"
        words = f"recall of a word after {row['distance']:,} tokens"
        rows.append((words, "" if teacher is None else share(teacher), share(row), gap))
    return rows


def share(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"{100 * row['accuracy']:.0f} % ({100 * low:.0f}-{100 * high:.0f})"


def notes(results: Mapping[str, Any]) -> list[str]:
    """Say how the answers were measured, and which window of the teacher takes as much memory."""
    found = []
    if memory := results.get("memory"):
        found.append("Memory: recurrent states in float32, keys and values in bfloat16.")
        last = memory[-1]
        window = last["model"] * last["tokens"] // last["teacher"]
        if 0 < window < last["tokens"]:
            sinks = min(SINKS, window - 1)
            found[-1] += (
                f" After {last['tokens']:,} tokens, this model takes as much as the keys and values of {window:,} "
                f"tokens. Compare it with its teacher limited to such a window, too: t2r evaluate --variant "
                f"TEACHER:window={window - sinks},sinks={sinks}."
            )
    if speed := results.get("speed"):
        threads = f" ({counted(speed['threads'], 'thread')})" if speed["device"] == "cpu" else ""
        where = f"{speed['dtype']} on {speed['device']}{threads}"
        found.append(f"Speed: both models in t2r.Engine, batch {speed['batch']}, {where}.")
    if recall := results.get("recall"):
        first = recall[0]
        found.append(
            f"Recall: a word that was mentioned once is told from others; {counted(first['trials'], 'trial')}, chance "
            f"{100 * first['chance']:.1f} %, 95 % intervals in parentheses."
        )
    return found


def memory_of(folder: Path) -> list[dict[str, int]]:
    """Return the memory of the model in a folder by length, for results that lack it; empty if there is no model."""
    try:
        if kind_of(folder / "config.json") != "file":
            return []
        config = load_config(str(folder))
        return memory_by_length(folder, lengths_within(positions_of(config)))
    except (T2RError, OSError):
        return []


def samples(page: Page, results: Mapping[str, Any]) -> None:
    """Add texts of the model beside the teacher's."""
    texts = [sample for sample in results.get("samples") or () if "teacher" in sample and "model" in sample]
    if not texts:
        return
    page.subheading("Samples")
    translates = results.get("task") == Translation.name
    page.paragraph("Greedy translations." if translates else "The same prompt and the same seed, temperature 0.8.")
    for sample in texts:
        page.paragraph(f"{'Source' if translates else 'Prompt'}: \u201c{sample['prompt']}\u201d")
        page.quotes({"teacher": sample["teacher"].strip(), MINE: sample["model"].strip()})


def completions(page: Page, folder: Path, prompts: Sequence[str]) -> None:
    """Let the model in a folder complete prompts, greedily."""
    from t2r.generation.text import generate

    if kind_of(folder / "config.json") != "file":
        raise T2RError(f"{folder} contains no model to complete prompts with")
    page.subheading("Completions")
    for completion in generate(folder, list(prompts), max_new_tokens=64, do_sample=False):
        page.quotes({completion.prompt: completion.text})


# --- The way there ------------------------------------------------------------------------------------------


def curves(
    page: Page, logs: Mapping[str, Sequence[Mapping[str, Any]]], recipe: Mapping[str, Any] | None = None
) -> None:
    """Add the loss and the learning rate of each stage by step. `recipe` is that of the stages, if it is known."""
    drawn: dict[str, str] = {}
    for stage, log in logs.items():
        for key, what in (("loss", "loss"), ("learning_rate", "learning rate")):
            points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None]
            if len(points) > 1:
                xs, ys = zip(*points, strict=True)
                log_y = key == "loss" and min(ys) > 0
                told = what if key == "loss" else rate_of(log, (recipe or {}).get(stage))
                drawn[f"{stage}: {told}"] = lines({stage: (xs, ys)}, "step", what, log_y=log_y)
    if drawn:
        page.subheading("Training")
        page.figures(drawn)


def rate_of(log: Sequence[Mapping[str, Any]], stage: Mapping[str, Any] | None) -> str:
    """Say whose learning rate is logged. Older versions logged that of the maps, whatever else was trained."""
    ratios = [e["map_learning_rate"] / e["learning_rate"] for e in log if e.get("map_learning_rate")]
    if ratios:
        return f"learning rate; that of the maps is {ratios[0]:.3g} times as high"
    own = stage is not None and stage.get("map_learning_rate") is not None and stage.get("train") != "maps"
    return "learning rate of the maps" if own else "learning rate"


def recipe_of(folder: Path) -> dict[str, Any]:
    """Return the stages of the recipe in a folder by name; empty if there is none."""
    if kind_of(folder) != "folder" or (text := read_inside(folder, "recipe.yaml")) is None:
        return {}
    recipe = parse_yaml(text, str(folder / "recipe.yaml"))
    return {stage["name"]: stage for stage in recipe.get("stages") or ()}


def data(page: Page, results: Mapping[str, Any]) -> None:
    rows = []
    for source in results.get("mixture") or ():
        read, part = sum(source["read"].values()), source.get("share_read")
        told = "" if part is None else f"{part:.1f} %"
        rows.append((Path(source["source"]).name, f"{source['tokens']:,}", f"{read:,}", told))
    if rows:
        page.subheading("Data")
        page.table(("source", "tokens", "tokens read", "share"), rows)


def configuration(page: Page, folder: Path) -> None:
    page.subheading("Configuration")
    if (text := read_inside(folder, "config.json")) is not None:
        config = parse_json(text, str(folder / "config.json"))
        base = config.get("base_config") or config
        facts = {name: base[name] for name in SIZES if base.get(name) is not None}
        if facts.get("dtype") == GUARD:  # in the place of the dtype, so that only t2r loads the folder
            del facts["dtype"]
        if config.get("model_type") == "t2r":
            own = ("dtype", *OPTIONS, "merged")
            facts |= {name: config[name] for name in own if config.get(name) is not None}
        page.facts({name: plain(value) for name, value in facts.items()})
    if (text := read_inside(folder, "recipe.yaml")) is not None:
        page.code(text, "recipe.yaml")


def plain(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def made(page: Page, facts: Mapping[str, Any] | None) -> None:
    """Add the command, the machine and the versions, as far as they were recorded."""
    if not facts:
        return
    if facts.get("command"):
        page.subheading("Command")
        page.code(facts["command"])
    page.subheading("Machine")
    devices = facts.get("devices") or {}
    shown = {"date": facts.get("date")}
    if cpu := devices.get("cpu"):
        shown["cpu"] = f"{counted(cpu['cores'], 'core')}, torch uses {counted(cpu['threads'], 'thread')}"
    shown |= {f"cuda:{i}": gpu["name"] for i, gpu in enumerate(devices.get("cuda") or ())}
    shown |= facts.get("versions") or {}
    page.facts({name: str(value) for name, value in shown.items() if value})
