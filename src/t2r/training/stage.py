"""A stage: one stretch of training, and every option it has."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from t2r.errors import T2RError
from t2r.options import check, option, options_of, refuse_unknown
from t2r.training.schedule import KINDS, Schedule

OBJECTIVES = ("task", "transfer", "distill")
TRAINED = ("maps", "attention", "all", "lora")
OPTIMIZERS = ("adamw", "adam", "muon", "nag")
NAME = re.compile(r"[\w-]+")
BUDGETS = ("steps", "tokens", "epochs", "minutes")


@dataclass(frozen=True)
class Stage:
    """What is minimized, what is trained, for how long, and how.

    Exactly one of `steps`, `tokens`, `epochs` and `minutes` says how long.
    """

    name: str = option(help="Names the stage's folder and its part of the results.")
    objective: str = option(
        help="`transfer`: attention outputs as the layer's own softmax gives them; `distill`: the teacher's "
        "distribution (KL); `task`: the text (cross entropy).",
        choices=OBJECTIVES,
    )
    train: str = option(
        "all",
        help="`maps`, `attention`, `all`, or `lora`: the maps, and adapters that are folded in at the end.",
        choices=TRAINED,
    )
    steps: int | None = option(None, help="Budget in optimizer steps.", minimum=1, maximum=10**9)
    tokens: int | None = option(None, help="Budget in tokens.", minimum=1, maximum=10**15)
    epochs: float | None = option(None, help="Budget in passes over the text.", above=0, maximum=10**6)
    minutes: float | None = option(
        None,
        help="Budget in minutes: the stage ends when they are over, and its learning rate follows the clock.",
        above=0,
        maximum=525_600,
    )
    batch_tokens: int = option(
        16384,
        help="Tokens of an optimizer step, over all devices and accumulation.",
        minimum=1,
        maximum=10**9,
    )
    device_tokens: int | None = option(
        None,
        help="Tokens of a forward on one device: fewer need less memory.",
        minimum=1,
        maximum=10**9,
        unset="as batch_tokens, at most 16,384",
    )
    block_size: int = option(
        512,
        help="Tokens of a block; shrinks to the positions that the teacher has. Of translation: tokens of pairs that "
        "are padded together, each pair as long as its longer side.",
        minimum=2,
        maximum=10**8,
    )
    optimizer: str = option(
        "adamw",
        help="`adamw`, `adam`, `muon` (matrices by Muon, the rest by Adam) or `nag` (the paper's).",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(1e-3, help="Learning rate at its peak.", above=0)
    map_learning_rate: float | None = option(None, help="Learning rate of the maps.", above=0, unset="as learning_rate")
    betas: list[float] = option(
        [0.9, 0.98],
        help="Of `adam`, `adamw`, and the part of `muon` that is Adam.",
        length=2,
        minimum=0,
        below=1,
    )
    epsilon: float = option(1e-8, help="Of Adam.", above=0, maximum=1)
    momentum: float = option(0.99, help="Of `nag`.", minimum=0, below=1)
    weight_decay: float = option(0.0, help="Decoupled weight decay.", minimum=0)
    clip_norm: float | None = option(
        1.0, help="Gradients are clipped to this norm; null for no clipping.", above=0, unset="no clipping"
    )
    schedule: str = option(
        "cosine",
        help="`constant`, `linear`, `cosine`, `inverse_sqrt` or `cosine_restarts` (fairseq's).",
        choices=KINDS,
    )
    warmup_steps: int = option(0, help="Steps over which the learning rate rises.", minimum=0, maximum=10**9)
    warmup_init: float = option(0.0, help="Learning rate at the start of the warm-up.", minimum=0)
    min_learning_rate: float = option(0.0, help="Learning rate at the end.", minimum=0)
    period: int | None = option(
        None, help="Of `cosine_restarts`: steps of the first cycle.", minimum=1, maximum=10**9, unset="none"
    )
    period_mult: float = option(
        1.0, help="Of `cosine_restarts`: by what each cycle is longer than the one before.", minimum=1
    )
    shrink: float = option(
        1.0, help="Of `cosine_restarts`: by what the peak shrinks with each cycle.", above=0, maximum=1
    )
    kl_weight: float = option(1.0, help="Of `distill`: weight of the KL divergence.", minimum=0)
    task_weight: float = option(0.0, help="Of `distill`: weight of the cross entropy.", minimum=0)
    temperature: float = option(1.0, help="Of `distill`: temperature of both distributions.", above=0)
    label_smoothing: float = option(
        0.0,
        help="Of the cross entropy: this share of a label is spread evenly over the vocabulary.",
        minimum=0,
        below=1,
    )
    noise: float = option(
        0.0,
        help="This share of the tokens read, chosen at random, is replaced by others of the batch: for a text that "
        "is read many times.",
        minimum=0,
        below=1,
    )
    noise_from: int = option(
        1,
        help="Noise begins with this reading of a block in this stage; 2: the first reading has none.",
        minimum=1,
        maximum=10**6,
    )
    lora_rank: int = option(16, help="Rank of the adapters.", minimum=1, maximum=10**6)

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}: "
        check(Stage, vars(self), where)
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise T2RError(f"{where}say how long by exactly one of {', '.join(BUDGETS)}; got {given or 'none'}")
        if not NAME.fullmatch(self.name):  # it becomes the name of a folder
            raise T2RError(f"{where}a name is made of letters, digits, - and _")
        if self.objective == "transfer" and self.train != "maps":
            raise T2RError(f"{where}transfer compares attention outputs with the model's own, so it trains maps only")
        if self.objective == "distill" and not self.kl_weight and not self.task_weight:
            raise T2RError(f"{where}kl_weight and task_weight are both 0: there is nothing to learn")
        if self.batch_tokens % self.block_size:
            raise T2RError(
                f"{where}batch_tokens {self.batch_tokens} is not a whole number of {self.block_size}-token blocks: "
                "change one of the two"
            )
        try:
            self.make_schedule(1)
        except T2RError as error:
            raise T2RError(f"{where}{error}") from error

    def fitted(self, steps: int) -> Stage:
        """The same for a budget of so many steps. A budget that ends before the warm-up would never reach the learning
        rate, so the warm-up (and the period after it) shrinks in proportion, or to a tenth without a period."""
        if self.warmup_steps < steps:
            return self
        whole = self.warmup_steps + self.period if self.period else 10 * self.warmup_steps
        period = None if self.period is None else max(1, self.period * steps // whole)
        return dataclasses.replace(self, warmup_steps=self.warmup_steps * steps // whole, period=period)

    def with_block_size(self, size: int) -> Stage:
        """The same in blocks of this size. `batch_tokens` is rounded down to whole blocks, and is at least one."""
        return dataclasses.replace(self, block_size=size, batch_tokens=max(1, self.batch_tokens // size) * size)

    def make_schedule(self, steps: int) -> Schedule:
        return Schedule(
            kind=self.schedule,
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=self.warmup_steps,
            warmup_init=self.warmup_init,
            floor=self.min_learning_rate,
            period=self.period,
            period_mult=self.period_mult,
            shrink=self.shrink,
        )


def make_stage(values: dict[str, Any]) -> Stage:
    """A stage from what YAML says."""
    where, known = f"stage {values['name']!r}: ", options_of(Stage)
    refuse_unknown(values, known, where)
    return Stage(**{name: known[name].read(value) for name, value in values.items()})
