"""A transformer becomes an RNN while you watch: what that costs in quality, and what it gains in speed and memory.

The teacher is a small GPT-2 that `t2r pretrain` has trained on novels; it lies beside this file, with an excerpt of
other novels. No GPU, no network: five minutes on two cores, or twenty with --full. Stop it anywhere; the same command
goes on where it was. Every number is measured here and now, and all of them are in a page at the end.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import t2r
from t2r.bench import decoding
from t2r.cli.common import calm
from t2r.evaluation import Text, encode, perplexity, read_text
from t2r.generation.text import complete
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.reporting import environment
from t2r.reporting.page import COLORS, Page, bars, lines
from t2r.surgery.adapters import family_of
from t2r.tasks.language_modeling import max_positions
from t2r.training.arithmetic import without_denormals
from t2r.training.recipe import load_recipe
from t2r.training.session import as_table, table_of

HERE = Path(__file__).parent


# --- What is converted, and for how long --------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Optimizer steps of each stage, and windows on which perplexity is measured."""

    transfer: int
    distill: int
    windows: int


SHORT = Budget(transfer=600, distill=540, windows=32)
FULL = Budget(transfer=900, distill=1550, windows=64)

# Within minutes, the number of steps counts for more than their size: a step is one block of text.
BLOCK = 512
TRANSFER = [
    "transfer.optimizer=muon",  # for maps of heads as small as these: as good after 150 steps as AdamW after 450
    "transfer.learning_rate=3e-2",
    "transfer.warmup_steps=10",
]
# Small steps are noisy: what is pretrained moves little, the maps move on.
DISTILL = [
    "distill.learning_rate=1e-4",
    "distill.map_learning_rate=5e-3",
    "distill.betas=[0.8,0.95]",
    "distill.schedule=linear",
    "distill.warmup_steps=10",
]
LEARNED = {"feature_size": 32}


@dataclass(frozen=True)
class Student:
    """One way to convert the teacher: a recipe, options of the swap, and whether the maps are to be folded."""

    name: str
    recipe: str = "distill-lm"
    options: dict[str, Any] = field(default_factory=lambda: dict(LEARNED))
    merged: bool = True
    share: float = 1.0
    """How much of the budget it gets."""

    def overrides(self, budget: Budget, block: int) -> list[str]:
        """The recipe's stages in this budget: first the maps alone learn, where there is something in them to learn."""
        common = [f"block_size={block}", f"batch_tokens={block}"]
        transfer, distill = (max(1, round(self.share * steps)) for steps in (budget.transfer, budget.distill))
        if self.recipe == "distill-lm":
            return [*common, f"transfer.steps={transfer}", f"distill.steps={distill}", *TRANSFER, *DISTILL]
        return [*common, f"distill.steps={distill + transfer // 2}"]  # it takes about as long


STUDENTS = [Student("RNN")]
MORE = [
    Student(
        "T2R-75%", options=LEARNED | {"softmax_every": 4}, share=0.75
    ),  # every fourth layer stays softmax attention
    Student("ELU", recipe=str(HERE / "elu.yaml"), options={}, merged=False, share=0.1),
]

PROMPT = "She opened the letter, and"
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 120, "seed": 0}
LENGTHS = (512, 2048, 8192)


# --- The demo -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """The model that walks in, and the text that it is judged by."""

    folder: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: Text
    window: int
    windows: int

    def score(self, model: PreTrainedModel) -> float:
        """Perplexity of any model of this tokenizer, as `convert` measures it."""
        half = self.window // 2
        return perplexity(model, self.text, window=self.window, stride=half, limit=self.windows).perplexity


@without_denormals()
def demo(teacher: str, train: str, valid: str, out: Path, full: bool, prompt: str, console: Console) -> None:
    began = time.perf_counter()
    budget, students = (FULL, STUDENTS + MORE) if full else (SHORT, STUDENTS)
    page = Page("A transformer becomes an RNN")

    console.rule("The teacher")
    device = str(choose_device("auto"))
    model = load_model(teacher, dtype="float32", device=device)
    tokenizer = load_tokenizer(teacher)
    if tokenizer is None:
        raise t2r.T2RError(f"{teacher} has no tokenizer: give the folder of a model that has one")
    block = min(BLOCK, max_positions(model) or BLOCK)
    text = encode(tokenizer, read_text(valid, tokenizer))
    known = Teacher(teacher, model, tokenizer, text, block, budget.windows)
    score = known.score(model)
    what = f"{model.config.model_type}, {model.num_parameters():,} parameters: perplexity {score:.2f} on {valid}"
    console.print(what, highlight=False)
    page.paragraph(f"The teacher is {what}.")

    results, models, scores = {}, {"teacher": model}, {"teacher": score}
    for student in students:
        console.rule(f"Converted: {student.name}")
        folder = out / student.name.lower().strip("%")
        results[student.name] = convert(known, student, budget, train, valid, folder, score, page, console)
        models[student.name] = load_model(str(folder), dtype="float32", device=device)
        scores[student.name] = known.score(models[student.name])
        show_conversion(known, student.name, results[student.name], scores, page, console)
    if len(students) > 1:
        console.rule("Side by side")
        show_scores(scores, page, console)
    show_training(results, page)

    console.rule("What they write")
    show_samples(models, tokenizer, prompt, page, console)

    console.rule("What a token costs")
    with console.status("") as status:
        report = decoding.run(models, LENGTHS, progress=status.update)
    for part in decoding.tables(report):
        console.print(part, highlight=False)
    show_speed(report, page)

    seconds = time.perf_counter() - began
    show_machine(seconds, page)
    page.write(out / "index.html")
    console.print(
        f"\nAll of it, with the curves, in {out / 'index.html'} ({seconds / 60:.1f} minutes)", highlight=False
    )


def convert(
    teacher: Teacher,
    student: Student,
    budget: Budget,
    train: str,
    valid: str,
    folder: Path,
    score: float,
    page: Page,
    console: Console,
) -> dict[str, Any]:
    """What `t2r.convert` measured: now, or when it made just this."""
    overrides = student.overrides(budget, teacher.window)
    if (done := finished(folder, student, overrides, score)) is not None:
        note = f"{folder} holds this conversion already: its stages were measured then. Remove it to see them again"
        console.print(note, highlight=False)
        page.paragraph(note)
        return done
    if folder.exists():
        console.print(f"{folder} holds another conversion, or of another teacher: it is made again", highlight=False)
    merges = family_of(teacher.model).merges
    return t2r.convert(
        teacher.folder,
        str(folder),
        train=train,
        valid=valid,
        recipe=student.recipe,
        overrides=overrides,
        limit=budget.windows,
        merged=True if student.merged and merges else None,
        overwrite=True,
        **student.options,
    )


def finished(folder: Path, student: Student, overrides: Sequence[str], score: float) -> dict[str, Any] | None:
    """The results in this folder, if they are of this plan and this teacher."""
    try:
        results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    plan = json.loads(json.dumps(load_recipe(student.recipe, overrides).to_dict()))
    same = recipe == plan and all(options.get(name) == value for name, value in student.options.items())
    return results if same and abs(results["teacher"]["perplexity"] / score - 1) < 1e-4 else None


# --- Showing: the same numbers on the terminal and on the page ----------------------------------------------


def show_conversion(
    teacher: Teacher, name: str, results: dict[str, Any], scores: dict[str, float], page: Page, console: Console
) -> None:
    """The perplexities as they came about, and that of what was saved, which must be the last of them."""
    saved = "merged and saved, as loaded" if results["merged"] else "saved, as loaded"
    header, rows = table_of(results, compared=True)
    cells = [*rows, (saved, f"{scores[name]:.2f}", against(name, scores), "")]
    console.print(as_table(header, cells))
    page.heading(f"{name}: what the conversion costs")
    page.table(header, cells, f"Perplexity in windows of {teacher.window} tokens, {teacher.windows} of them at most")
    heights = {label: float(value) for label, value, *_ in cells if value != "not finite"}
    drawn = bars(heights, "perplexity", log=True, colors=[COLORS[0]] + [COLORS[1]] * len(heights))
    page.figures({"From the teacher to the saved model": drawn})


def show_scores(scores: dict[str, float], page: Page, console: Console) -> None:
    header = ("model", "perplexity", "against the teacher")
    cells = [(name, f"{score:.2f}", against(name, scores)) for name, score in scores.items()]
    console.print(as_table(header, cells))
    page.heading("Side by side")
    page.table(header, cells)
    page.figures({"All of them as saved": bars(scores, "perplexity")})


def against(name: str, scores: dict[str, float]) -> str:
    return f"{scores[name] / scores['teacher'] - 1:+.1%}"


def show_training(results: dict[str, dict[str, Any]], page: Page) -> None:
    page.heading("How they learned")
    says = {"transfer": "relative error of attention outputs", "distill": "KL to the teacher"}
    drawn = {}
    for stage, what in says.items():
        logs = {name: result["log"][stage] for name, result in results.items() if stage in result["log"]}
        curves = {name: ([e["step"] for e in log], [e["loss"] for e in log]) for name, log in logs.items()}
        drawn[f"{stage}: {what}, on the text it learns from"] = lines(
            curves, "step", what, log_y=True, colors=COLORS[1:]
        )
    page.figures(drawn)


def show_samples(
    models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, prompt: str, page: Page, console: Console
) -> None:
    """The same prompt, the same seed."""
    table = Table(show_lines=True)
    texts = {}
    for name, model in models.items():
        texts[name] = prompt + next(complete(model, tokenizer, [prompt], **SAMPLE)).text
        table.add_column(name, ratio=1)
    table.add_row(*(text.replace("[", "\\[") for text in texts.values()))
    console.print(table)
    page.heading("What they write")
    page.paragraph(f"The same prompt and the same seed, temperature {SAMPLE['temperature']}: {prompt!r}")
    page.quotes(texts)


def show_speed(report: decoding.Report, page: Page) -> None:
    page.heading("What a token costs")
    names = list(dict.fromkeys(point.model for point in report.points))
    lengths = {name: [point.length for point in report.of(name)] for name in names}
    speed = {name: (lengths[name], [point.tokens_per_second for point in report.of(name)]) for name in names}
    memory = {name: (lengths[name], [point.cache_bytes / 2**20 for point in report.of(name)]) for name in names}
    look: dict[str, Any] = {"log_x": True, "markers": True}
    page.figures(
        {
            "Tokens a second, after so many tokens": lines(speed, "tokens before", "tokens/s", **look),
            "What is kept from token to token": lines(memory, "tokens before", "MiB", log_y=True, **look),
        }
    )
    page.table(decoding.HEADER, decoding.cells(report), decoding.title(report))
    for note in decoding.notes(report):
        page.paragraph(note)


def show_machine(seconds: float, page: Page) -> None:
    facts = environment.describe()
    cpu, gpus = facts["devices"]["cpu"], facts["devices"]["cuda"]
    machine = [("date", time.strftime("%Y-%m-%d %H:%M")), ("this run", f"{seconds:.0f} seconds")]
    machine += [("cpu", f"{cpu['cores']} cores, torch uses {cpu['threads']} threads")]
    machine += [(f"cuda:{i}", gpu["name"]) for i, gpu in enumerate(gpus)]
    machine += [(name, version) for name, version in facts["versions"].items() if version]
    page.heading("Where this was measured")
    page.table(("", ""), machine)


# What ships with the demo, beside this file.
TEACHER, TRAIN, VALID = (str(HERE / name) for name in ("teacher", "novels/train.txt.xz", "novels/valid.txt.xz"))


def main(
    teacher: Annotated[str, typer.Option(help="A language model's folder.", show_default="the one here")] = TEACHER,
    train: Annotated[str, typer.Option(help="Text to train on.", show_default="novels")] = TRAIN,
    valid: Annotated[str, typer.Option(help="Text to measure on.", show_default="other novels")] = VALID,
    out: Annotated[Path | None, typer.Option(help="Where to.", show_default="runs/demo or runs/demo-full")] = None,
    full: Annotated[bool, typer.Option("--full", help="Longer, and with T2R-75% and ELU too.")] = False,
    prompt: Annotated[str, typer.Option(help="What the samples begin with.")] = PROMPT,
) -> None:
    """Convert a teacher into an RNN, compare the two, and write a page about it."""
    out = out or Path("runs", "demo-full" if full else "demo")
    logging.getLogger("t2r").setLevel(logging.INFO)
    try:
        with calm(False):
            demo(teacher, train, valid, out, full, prompt, Console())
    except t2r.T2RError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
