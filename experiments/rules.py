"""A trial of rules: how should a state be advanced by what has left the windows?

    python experiments/rules.py --scale smoke
    python experiments/rules.py --scale full --model smollm2 --data texts --out runs/rules

One model, one plan of windows (that of `t2r convert --memory`), one order of the data, as many steps, as many bytes;
and three rules for what leaves a window: sums, sums with decay (what the recipe `memory-lm` trains), and the gated
delta rule (delta.py). Beside them the windows alone, distilled as long, because these a state must beat. Each is
measured on a held-out text (perplexity, KL to the model itself) and by recall.

A rule that is done is not run again, and an interrupted training continues: the same call resumes. `--rules delta` runs
some. The result is OUT/results.json and OUT/table.md, written after each rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import delta
from t2r.budgets.costs import SINKS
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.evaluation import evaluate, recall
from t2r.evaluation.inputs import read_text
from t2r.experiments.data import prepared
from t2r.experiments.markup import markdown
from t2r.hub import choose_device, load_config, load_model, load_tokenizer
from t2r.options import Conversion
from t2r.pipelines.budget import plan_memory
from t2r.pipelines.convert import train_stages
from t2r.pipelines.preparation import prepare
from t2r.plans import MemoryPlan
from t2r.reporting import environment
from t2r.storage import whole_folder, write_text
from t2r.training.sessions.session import Session
from t2r.training.steps.arithmetic import without_denormals

logger = logging.getLogger("rules")

ROOT = Path(__file__).parents[1]
RULES: dict[str, dict[str, Any]] = {
    "windows": {},
    "sums": {"feature_map": "t2r", "decay": False},
    "decay": {"feature_map": "t2r", "decay": True},
    "delta": {"feature_map": "delta", "decay": False},
}
"""The rules, with the options of their swap that differ. `windows`: none, what leaves a window is lost."""
TITLES = {
    "teacher": "the model itself",
    "windows": "windows alone",
    "sums": "and sums",
    "decay": "and sums with decay",
    "delta": "and the gated delta rule",
}
OF_STATES = {"activation": "softmax", "init": "identity", "key_weights": True, "shared": False, "grouped": True}
"""The options that all states have, as in `memory-lm`."""


@dataclass(frozen=True)
class Scale:
    """How much is trained and measured."""

    context: int
    memory: str | None
    """The budget of the plan. None: windows of `SIZES` in turn, which nothing planned."""
    transfer: int
    """Steps in which the maps alone learn what the windows miss."""
    distill: int
    batch_tokens: int
    windows: int
    """Windows of the held-out text that are measured, of each length."""
    lengths: tuple[int, ...]
    distances: tuple[int, ...]
    trials: int
    train: tuple[str, ...] = ()
    """Texts of `t2r.experiments.data`, with a number of readings. None: those of the examples."""
    valid: str = ""


LAST = 5
"""Logged losses of the transfer that are averaged in the table."""
SIZES, FEATURES = (8, 16, 32), 8
SCALES = {
    "smoke": Scale(128, None, 2, 2, 256, 4, (128,), (16, 64), 8),
    "small": Scale(256, None, 120, 30, 512, 32, (256,), (64, 128), 32, ("novels/train",), "novels/valid"),
    "full": Scale(
        2048, "4.28MiB", 150, 400, 16384, 100, (2048, 4096), (256, 1024, 4096), 128,
        ("wiki/enwiki2018-core", "wikitext/train:2"), "wikitext/valid",
    ),
}  # fmt: skip
"""`full` is for an accelerator."""


@dataclass(frozen=True)
class Trial:
    """A trial in a folder."""

    model: str
    out: Path
    scale: Scale
    train: list[str]
    valid: str
    device: str
    compiled: bool | None
    plan_file: Path | None = None

    def remembered(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the content of a JSON file of the folder, which is made if it is not there."""
        path = self.out / f"{name}.json"
        if not path.is_file():
            found = make()
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(found, indent=1) + "\n")
        return json.loads(path.read_text(encoding="utf-8"))

    def plan(self) -> dict[str, Any]:
        """Return the plan of all rules, and the features of their states."""

        def make() -> dict[str, Any]:
            if self.plan_file is not None:
                return known_plan(self.plan_file)
            scale = self.scale
            if scale.memory is None:
                return {"features": FEATURES, "plan": stated_plan(self.model).to_dict()}
            given: Any = {"train": self.train, "context": scale.context, "device": self.device}
            return plan_memory(self.model, [scale.memory], **given)[0].to_dict()

        return self.remembered("plan", make)

    def conversion(self, rule: str) -> Conversion:
        """Return the arguments of a conversion, as `t2r convert` takes them."""
        scale, states = self.scale, rule != "windows"
        steps = [f"transfer.steps={scale.transfer}", f"distill.steps={scale.distill}"]
        given: dict[str, Any] = {
            "recipe": "memory-lm",
            "overrides": [*steps, f"batch_tokens={scale.batch_tokens}", f"block_size={scale.context}"],
            "train": self.train,
            "valid": self.valid,
            "limit": min(scale.windows, 16),
            "device": self.device,
            "compiled": self.compiled,
            "overwrite": True,
            **(OF_STATES | RULES[rule] | {"feature_size": self.plan()["features"]} if states else {}),
        }
        conversion = Conversion(self.model, str(self.out / f"model-{rule}"), **given)
        conversion.given = frozenset(given)
        return conversion

    def trained(self, rule: str) -> dict[str, Any]:
        """Train the model with a rule, and save it. Returns the losses and how long it took."""
        conversion, plan, began = self.conversion(rule), self.plan()["plan"], time.monotonic()
        start = prepare(conversion)
        options = start.facts["swap"]
        if rule == "windows":
            plan = plan | {"states": [[False] * len(row) for row in plan["windows"]]}
            start.plan = dataclasses.replace(start.plan, stages=start.plan.stages[1:])  # there are no maps to transfer
            options = {"seed": options["seed"]}
        start.config = T2RConfig(**options, plan=plan)
        start.facts["memory_plan"] = plan
        with Session(
            conversion.out, start.plan, start.task, start.settings, start.place, start.facts, began=began
        ) as session:
            student, frozen = start.models()
            session.prepare(student, frozen)
            student, results = train_stages(session, student, frozen, start.config, None)
            results |= session.pace() | {"log": session.logs()}
            with whole_folder(conversion.out, overwrite=True) as folder:
                student.eval().save_pretrained(folder)
                start.tokenizer.save_pretrained(folder)
            session.run.remove()
        if start.place.type == "cuda":
            results["peak_memory"] = torch.cuda.max_memory_allocated(start.place)
        return results

    def measured(self, folder: str) -> dict[str, Any]:
        """Return perplexity and KL on the held-out text for each length, and recall at each distance."""
        scale, tokenizer = self.scale, load_tokenizer(self.model)
        assert tokenizer is not None
        place = str(choose_device(self.device))
        teacher = load_model(self.model, dtype="float32", device=place)
        model = teacher if folder == self.model else load_model(folder, dtype="float32", device=place)
        rows = evaluate(
            model,
            self.valid,
            tokenizer=tokenizer,
            teacher=teacher,
            window=list(scale.lengths),
            limit=scale.windows,
            generation=False,
            device=place,
            progress=True,
        )
        found = rows[0].get("measured", rows)
        text = read_text(self.valid, tokenizer)
        asked = recall(model, tokenizer, text, distances=scale.distances, trials=scale.trials, batch_size=None)
        names = ("window", "tokens", "perplexity", "interval", "kl", "agreement", "kept_bytes")
        return {
            "parameters": model.num_parameters(),
            "measured": [{name: row[name] for name in names} for row in found],
            "recall": [row._asdict() for row in asked],
        }

    def run(self, rules: Sequence[str]) -> None:
        """Train and measure what is not there yet. The results are written after each rule."""
        self.same()
        self.remembered("teacher", lambda: self.measured(self.model))
        for rule in rules:
            trained = self.remembered(f"{rule}-trained", lambda rule=rule: self.trained(rule))  # type: ignore[misc]
            logger.info("%s: trained for %s s", TITLES[rule], trained["seconds"])
            self.remembered(rule, lambda rule=rule: self.measured(str(self.out / f"model-{rule}")))  # type: ignore[misc]
            self.write()
        print((self.out / "table.md").read_text(encoding="utf-8"))

    def same(self) -> None:
        """Raise T2RError if the folder has another trial."""
        given = dataclasses.asdict(self.scale) | {"model": self.model, "train": self.train, "valid": self.valid}
        given = json.loads(json.dumps(given))
        if (known := self.remembered("trial", lambda: given)) != given:
            wrong = ", ".join(name for name in given if known.get(name) != given[name])
            raise T2RError(f"{self.out} has a trial with another {wrong}: choose another --out")

    def results(self) -> dict[str, Any]:
        """Return what is known now."""
        found = {"trial": self.load("trial"), "plan": self.load("plan"), "machine": environment.made()}
        for name in TITLES:
            if (measured := self.load(name)) is not None:
                found[name] = measured | {"trained": self.load(f"{name}-trained")}
        return found

    def load(self, name: str) -> Any:
        path = self.out / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def write(self) -> None:
        results = self.results()
        write_text(self.out / "results.json", json.dumps(results, indent=1) + "\n")
        write_text(self.out / "table.md", table(results))


def stated_plan(model: str) -> MemoryPlan:
    """Return a plan with windows of `SIZES` in turn."""
    config = load_config(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = range(config.num_hidden_layers)
    windows = (tuple(SIZES[(layer + head) % len(SIZES)] for head in range(heads)) for layer in layers)
    return MemoryPlan(tuple(windows), SINKS)


def known_plan(path: Path) -> dict[str, Any]:
    """Read the plan of a converted model, from its config.json, or of another trial, from its plan.json."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not found.get("plan") or not (features := features_of(found)):
        raise T2RError(f"{path} has no plan with states")
    return {"features": features, "plan": MemoryPlan.of(found["plan"]).to_dict()}


def features_of(found: dict[str, Any]) -> int | None:
    return found.get("features") or found.get("feature_size")


def table(results: dict[str, Any]) -> str:
    """Return a row for each rule: memory, perplexity and KL by length, recall by distance, and time of training."""
    rows = []
    for name in TITLES:
        if name not in results:
            continue
        own, teacher = results[name], results["teacher"]
        cells = [TITLES[name], f"{own['measured'][0]['kept_bytes'] / 2**20:.3f} MiB"]
        for row, reference in zip(own["measured"], teacher["measured"], strict=True):
            gap = f" ({100 * (row['perplexity'] / reference['perplexity'] - 1):+.2f} %)"
            cells += [f"{row['perplexity']:.3f}{'' if name == 'teacher' else gap}"]
            cells += ["" if name == "teacher" else f"{row['kl']:.4f}"]
        cells += [f"{100 * part['accuracy']:.0f} %" for part in own["recall"]]
        trained = own["trained"]
        cells += [learned(trained)]
        cells += ["" if trained is None else " + ".join(f"{seconds:.0f}" for seconds in trained["seconds"].values())]
        rows.append(cells)
    first = results["teacher"]
    lengths = [text for row in first["measured"] for text in (f"perplexity at {row['window']:,}", "KL")]
    distances = [f"recall after {part['distance']:,}" for part in first["recall"]]
    return markdown(["", "memory", *lengths, *distances, "error after the transfer", "seconds of training"], rows)


def learned(trained: dict[str, Any] | None) -> str:
    """Return the error of windows and states after the transfer, relative to that of the windows alone."""
    losses = [entry["loss"] for entry in ((trained or {}).get("log", {}).get("transfer") or [])]
    last = losses[-LAST:]
    return f"{sum(last) / len(last):.3f}" if last else ""


def texts_of(scale: Scale, data: Path | None, work: Path) -> tuple[list[str], str]:
    """Return the files of the training text and of the held-out text."""
    if not scale.train:
        novels = ROOT / "examples" / "novels"
        return [str(novels / "train.txt.xz")], str(novels / "valid.txt.xz")
    if data is None:
        raise T2RError("this scale requires --data, the folder of the texts")
    train = []
    for entry in scale.train:
        name, _, readings = entry.partition(":")
        train.append(f"{prepared(name, data, work)}{readings and ':' + readings}")
    return train, str(prepared(scale.valid, data, work))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument("--model", default=str(ROOT / "examples" / "teacher"), help="the folder of the model")
    parser.add_argument("--data", type=Path, help="the folder of the texts, as for t2r reproduce")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/rules-SCALE")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--plan", type=Path, help="a plan that is known: the config.json of a model, or a plan.json")
    parser.add_argument("--memory", help="bytes of a sequence, instead of the scale's")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("TRANSFER", "DISTILL"), help="instead of the scale's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="as for t2r convert")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    delta.register()
    scale = SCALES[given.scale]
    if given.memory is not None:
        scale = dataclasses.replace(scale, memory=given.memory)
    if given.steps is not None:
        scale = dataclasses.replace(scale, transfer=given.steps[0], distill=given.steps[1])
    out = given.out or Path("runs") / f"rules-{given.scale}"
    try:
        texts = texts_of(scale, given.data, out / "texts")
        trial = Trial(given.model, out, scale, *texts, given.device, given.compile, given.plan)
        with without_denormals():
            trial.run(given.rules)
    except T2RError as error:
        sys.exit(f"rules: {error}")


if __name__ == "__main__":
    main()
