"""Texts that are longer than the blocks of the training: what do states beside windows do there?

    python experiments/far.py --model stories15m
    python experiments/far.py --model stories15m --ways short moved --steps 20 5

One model with rotary positions, one plan of windows, one text that the model wrote itself, as many tokens of training,
and three ways to train it: blocks of a quarter of the context; the same, and the positions of every second block start
at a random place; and blocks of the whole context in the last part. Beside them the windows without states and
training.

Each is measured by its KL divergence from the model itself: at the length of the blocks, there with positions that
start at the end of the context, at the whole context by quarters, and there without what its states add. The share is
that of the states in all attention weights of heads. A way that is done is not run again. The result is
OUT/results.json and OUT/table.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rules import stated_plan
from t2r.attention.recurrence import Recurrence, recurrent_sites
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.experiments.markup import markdown
from t2r.generation.teacher import write_corpus
from t2r.hub import load_model, load_tokenizer
from t2r.ops import Sums
from t2r.options import Conversion
from t2r.pipelines.convert import train_stages
from t2r.pipelines.preparation import prepare
from t2r.reporting import environment
from t2r.storage import whole_folder, write_text
from t2r.training.sessions.session import Session
from t2r.training.steps.arithmetic import without_denormals

logger = logging.getLogger("far")

BLOCK, CONTEXT, FEATURES = 64, 256, 8
BATCH = 512
TEXT, HELD_OUT = 128 * CONTEXT, 32 * CONTEXT
"""Tokens that the model writes, for training and for measuring."""
WAYS = {
    "windows": "windows alone, not trained",
    "short": "blocks of a quarter",
    "moved": "the same, every second one moved",
    "late": "the last third in whole blocks",
}


def recipe(way: str, transfer: int, distill: int) -> dict[str, Any]:
    """Return `memory-lm` with these steps."""
    of_all = {"batch_tokens": BATCH, "reach": CONTEXT if way == "moved" else None}
    maps = {"objective": "transfer", "train": "maps", "learning_rate": 1e-2, "betas": [0.8, 0.95], "schedule": "linear"}
    whole = {"objective": "distill", "learning_rate": 2.5e-4, "map_learning_rate": 2.5e-3, "betas": [0.9, 0.95]}
    late = distill // 3 if way == "late" else 0
    stages = [
        {"name": "transfer", "steps": transfer, "block_size": BLOCK, "warmup_steps": transfer // 10, **maps},
        {"name": "distill", "steps": distill - late, "block_size": BLOCK, "warmup_steps": distill // 10, **whole},
    ]
    if late:
        stages.append({"name": "late", "steps": late, "block_size": CONTEXT, **whole})
    options = {"feature_map": "t2r", "activation": "softmax", "init": "identity", "key_weights": True}
    swap = options | {"shared": False, "grouped": True, "decay": True, "feature_size": FEATURES}
    return {"name": f"far-{way}", "swap": swap, "stages": [of_all | stage for stage in stages]}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial in a folder."""

    model: str
    out: Path
    transfer: int
    distill: int

    def text(self, name: str, tokens: int, seed: int) -> str:
        """Return the file of a text that the model wrote."""
        model, tokenizer = load_model(self.model, dtype="float32", device="cpu"), load_tokenizer(self.model)
        assert tokenizer is not None
        return str(write_corpus(model, tokenizer, self.out / name, tokens=tokens, length=CONTEXT, seed=seed))

    def trained(self, way: str) -> None:
        """Train the model in one way, and save it."""
        file = self.out / f"{way}.yaml"
        write_text(file, json.dumps(recipe(way, self.transfer, self.distill)))
        given: dict[str, Any] = {"recipe": str(file), "train": [self.text("train", TEXT, 0)], "device": "cpu"}
        conversion = Conversion(self.model, str(self.out / way), **given, overwrite=True)
        conversion.given = frozenset(given)
        start = prepare(conversion)
        plan = stated_plan(self.model).to_dict()
        if way == "windows":
            plan = plan | {"states": [[False] * len(row) for row in plan["windows"]]}
            start.plan = dataclasses.replace(start.plan, stages=())
            start.facts["swap"] = {"seed": start.facts["swap"]["seed"]}
        start.config = T2RConfig(**start.facts["swap"], plan=plan)
        start.facts["memory_plan"] = plan
        with Session(conversion.out, start.plan, start.task, start.settings, start.place, start.facts) as session:
            student, frozen = start.models()
            session.prepare(student, frozen)
            student, _ = train_stages(session, student, frozen, start.config, None)
            with whole_folder(conversion.out, overwrite=True) as folder:
                student.eval().save_pretrained(folder)
                start.tokenizer.save_pretrained(folder)
            session.run.remove()

    def measured(self, way: str) -> dict[str, Any]:
        """Return divergences, and the shares of the states, of the model that was trained in one way."""
        teacher, tokenizer = load_model(self.model, dtype="float32", device="cpu"), load_tokenizer(self.model)
        assert tokenizer is not None
        texts = [json.loads(line)["text"] for line in Path(self.text("valid", HELD_OUT, 1)).read_text().splitlines()]
        read = [tokenizer(text, add_special_tokens=False)["input_ids"][:CONTEXT] for text in texts]
        ids = torch.tensor([row for row in read if len(row) == CONTEXT])
        model = load_model(str(self.out / way), dtype="float32", device="cpu")
        short, quarters = ids.view(-1, BLOCK), (4, CONTEXT // 4)
        found: dict[str, Any] = {
            "short": divergence(model, teacher, short).mean().item(),
            "moved": divergence(model, teacher, short, CONTEXT - BLOCK).mean().item(),
        }
        with watching() as shares:
            whole = divergence(model, teacher, ids)
        found["whole"] = whole.mean().item()
        found["quarters"] = whole.mean(0).view(quarters).mean(1).tolist()
        if recurrent_sites(model):
            found["shares"] = torch.stack(shares).mean(0).view(quarters).mean(1).tolist()
            with without_states():
                found["without"] = divergence(model, teacher, ids).mean(0).view(quarters).mean(1).tolist()
        return found

    def run(self, ways: list[str]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for way in ways:
            file = self.out / f"{way}.json"
            if not file.is_file():
                if not (self.out / way).is_dir():
                    self.trained(way)
                write_text(file, json.dumps(self.measured(way), indent=1) + "\n")
            self.write()
        print((self.out / "table.md").read_text(encoding="utf-8"))

    def write(self) -> None:
        files = {way: self.out / f"{way}.json" for way in WAYS}
        results = {way: json.loads(file.read_text()) for way, file in files.items() if file.is_file()}
        steps = {"transfer": self.transfer, "distill": self.distill, "machine": environment.made()}
        write_text(self.out / "results.json", json.dumps(results | steps, indent=1) + "\n")
        write_text(self.out / "table.md", table(results))


def divergence(model: Any, teacher: Any, ids: Tensor, first: int = 0) -> Tensor:
    """Return the KL divergence from the teacher at each position, `[rows, time]`. `first` is the first position."""
    found = []
    with torch.no_grad():
        for rows in ids.split(max(1, 2048 // ids.shape[1])):
            places = torch.arange(first, first + rows.shape[1])[None].expand(len(rows), -1)
            p = teacher(input_ids=rows, use_cache=False).logits.log_softmax(-1)
            q = model(input_ids=rows, position_ids=places, use_cache=False).logits.log_softmax(-1)
            found.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(found)


@contextmanager
def watching() -> Iterator[list[Tensor]]:
    """Collect the share of the states in the weights of each position, averaged over rows and heads."""
    from t2r import ops

    shares: list[Tensor] = []
    combine = ops.combine

    def watched(parts: list[Sums], *given: Any) -> Tensor:
        logs = torch.stack([part.denominator.log() + (0 if part.peak is None else part.peak) for part in parts])
        shares.append(logs.softmax(0)[-1].mean((0, 1)))
        return combine(parts, *given)

    ops.combine = watched  # type: ignore[assignment]
    try:
        yield shares
    finally:
        ops.combine = combine


@contextmanager
def without_states() -> Iterator[None]:
    """Leave out what the states say."""
    attend = Recurrence.attend_far

    def nothing(self: Recurrence, *given: Any) -> Sums:
        sums = attend(self, *given)
        return Sums(torch.zeros_like(sums.numerator), torch.zeros_like(sums.denominator))

    Recurrence.attend_far = nothing  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Recurrence.attend_far = attend  # type: ignore[method-assign]


def table(results: dict[str, Any]) -> str:
    """Return a row for each way."""
    quarters = [f"{i * CONTEXT // 4 + 1} to {(i + 1) * CONTEXT // 4}" for i in range(4)]
    header = ["", f"KL at {BLOCK}", f"from position {CONTEXT - BLOCK}", f"KL at {CONTEXT}", *quarters]
    rows = []
    for way, found in results.items():
        cells = [found["short"], found["moved"], found["whole"], *found["quarters"]]
        rows.append([WAYS[way], *(f"{x:.3f}" for x in cells)])
        if "without" in found:
            rows.append(["its windows without its states", "", "", "", *(f"{x:.3f}" for x in found["without"])])
            rows.append(["the share of its states", "", "", "", *(f"{100 * x:.1f} %" for x in found["shares"])])
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder; rotary positions, context 256")
    parser.add_argument("--out", type=Path, default=Path("runs/far"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, nargs=2, metavar=("TRANSFER", "DISTILL"), default=(90, 60))
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with without_denormals():
            Trial(given.model, given.out, *given.steps).run(given.ways)
    except T2RError as error:
        sys.exit(f"far: {error}")


if __name__ == "__main__":
    main()
