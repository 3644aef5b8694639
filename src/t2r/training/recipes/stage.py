"""A stage of training and its options."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from t2r.errors import T2RError
from t2r.options import check, option, options_of, refuse_unknown
from t2r.training.recipes.schedule import KINDS, Schedule

OBJECTIVES = ("task", "transfer", "distill")
TRAINED = ("maps", "attention", "all", "lora")
OPTIMIZERS = ("adamw", "adam", "muon", "nag")
NAME = re.compile(r"[\w-]+")
BUDGETS = ("steps", "tokens", "epochs", "minutes")


@dataclass(frozen=True)
class Stage:
    """The objective, the trained parameters, the budget and the optimizer of a stage.

    Exactly one of `steps`, `tokens`, `epochs` and `minutes` sets the budget.
    """

    name: str = option(help="Name of the stage, used for its folder and in the results.")
    objective: str = option(
        help="`transfer`: match the outputs of each layer's softmax attention; `distill`: match the teacher's "
        "distribution (KL divergence); `task`: predict the text (cross entropy).",
        choices=OBJECTIVES,
    )
    train: str = option(
        "all",
        help="Parameters to train: `maps`, `attention`, `all`, or `lora` (the maps, and LoRA adapters that are merged "
        "at the end).",
        choices=TRAINED,
    )
    steps: int | None = option(None, help="Budget in optimizer steps.", minimum=1, maximum=10**9)
    tokens: int | None = option(None, help="Budget in tokens.", minimum=1, maximum=10**15)
    epochs: float | None = option(None, help="Budget in epochs.", above=0, maximum=10**6)
    minutes: float | None = option(
        None,
        help="Budget in minutes. The learning rate then follows the elapsed time.",
        above=0,
        maximum=525_600,
    )
    batch_tokens: int = option(
        16384,
        help="Tokens per optimizer step, over all devices and accumulation steps.",
        minimum=1,
        maximum=10**9,
    )
    device_tokens: int | None = option(
        None,
        help="Maximum tokens per forward pass on one device. Fewer need less memory.",
        minimum=1,
        maximum=10**9,
        unset="as batch_tokens, at most 16,384",
    )
    block_size: int = option(
        512,
        help="Tokens per block, limited to the positions of the teacher. Translation: tokens of the pairs of a block, "
        "padding included; a pair counts as its longer side.",
        minimum=2,
        maximum=10**8,
    )
    optimizer: str = option(
        "adamw",
        help="`adamw`, `adam`, `muon` (Muon for matrices, AdamW for the rest) or `nag` (the paper's).",
        choices=OPTIMIZERS,
    )
    learning_rate: float = option(1e-3, help="Peak learning rate.", above=0)
    map_learning_rate: float | None = option(
        None, help="Peak learning rate of the maps.", above=0, unset="as learning_rate"
    )
    betas: list[float] = option(
        [0.9, 0.98],
        help="Betas of `adam` and `adamw`, also within `muon`.",
        length=2,
        minimum=0,
        below=1,
    )
    epsilon: float = option(1e-8, help="Epsilon of `adam` and `adamw`.", above=0, maximum=1)
    momentum: float = option(0.99, help="Momentum of `nag`.", minimum=0, below=1)
    weight_decay: float = option(0.0, help="Decoupled weight decay, with every optimizer.", minimum=0)
    clip_norm: float | None = option(
        1.0, help="Maximum gradient norm; null for no clipping.", above=0, unset="no clipping"
    )
    schedule: str = option(
        "cosine",
        help="Learning rate schedule: `constant`, `linear`, `cosine`, `inverse_sqrt` or `cosine_restarts` (fairseq's).",
        choices=KINDS,
    )
    warmup_steps: int = option(0, help="Warm-up steps.", minimum=0, maximum=10**9)
    warmup_init: float = option(0.0, help="Learning rate at the start of the warm-up.", minimum=0)
    min_learning_rate: float = option(0.0, help="Learning rate at the end of the schedule.", minimum=0)
    period: int | None = option(
        None, help="`cosine_restarts`: steps of the first cycle.", minimum=1, maximum=10**9, unset="none"
    )
    period_mult: float = option(
        1.0, help="`cosine_restarts`: factor by which each cycle is longer than the one before.", minimum=1
    )
    shrink: float = option(
        1.0, help="`cosine_restarts`: factor by which the learning rates shrink with each cycle.", above=0, maximum=1
    )
    kl_weight: float = option(1.0, help="`distill`: weight of the KL divergence.", minimum=0)
    task_weight: float = option(0.0, help="`distill`: weight of the cross entropy.", minimum=0)
    temperature: float = option(1.0, help="`distill`: temperature of both distributions.", above=0)
    label_smoothing: float = option(
        0.0,
        help="Label smoothing of the cross entropy.",
        minimum=0,
        below=1,
    )
    dropout: bool = option(
        True,
        help="Whether the model's dropout is active. Without it, a student follows its teacher more closely.",
    )
    noise: float = option(
        0.0,
        help="Token noise: the fraction of input tokens that is replaced at random by other tokens of the batch. Helps "
        "with a text that is read for many epochs.",
        minimum=0,
        below=1,
    )
    noise_from: int = option(
        1,
        help="The first reading of a block with token noise, from 1; 2: the first reading has none.",
        minimum=1,
        maximum=10**6,
    )
    reach: int | None = option(
        None,
        help="The positions of every second block start at a random place, so that they reach up to this number, or up "
        "to the positions of the teacher. States then work in texts that are longer than a block. Only for rotary "
        "positions, of which softmax attention sees the differences alone.",
        minimum=1,
        maximum=10**8,
        unset="blocks start at position 0",
    )
    average: int = option(
        1,
        help="Number of points at the end of the stage whose weights are averaged: the ends of the last epochs or, if "
        "epochs are long, evenly spaced steps in the last quarter of the stage. 1: the last weights.",
        minimum=1,
        maximum=1000,
    )
    lora_rank: int = option(16, help="Rank of the LoRA adapters.", minimum=1, maximum=10**6)

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}: "
        check(Stage, vars(self), where)
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise T2RError(f"{where}set the budget by exactly one of {', '.join(BUDGETS)}; got {given or 'none'}")
        if not NAME.fullmatch(self.name):  # the name of a folder
            raise T2RError(f"{where}a name may contain only letters, digits, - and _")
        if self.objective == "transfer" and self.train != "maps":
            raise T2RError(f"{where}objective transfer requires train: maps; got {self.train}")
        if self.objective == "distill" and not self.kl_weight and not self.task_weight:
            raise T2RError(f"{where}kl_weight and task_weight are both 0: there is nothing to minimize")
        if self.average > 1 and self.train == "lora":
            raise T2RError(
                f"{where}average is not possible with train: lora: the mean of two adapters is not an adapter"
            )
        if self.batch_tokens % self.block_size:
            raise T2RError(
                f"{where}batch_tokens {self.batch_tokens} is not a multiple of block_size {self.block_size}: "
                "change one of them"
            )
        try:
            self.make_schedule(1)
        except T2RError as error:
            raise T2RError(f"{where}{error}") from error

    def fitted(self, steps: int) -> Stage:
        """Return the stage for a budget of `steps` steps.

        If the budget is not longer than the warm-up, the warm-up and the period are scaled to the budget; without a
        period, the warm-up becomes a tenth of it. With a time budget, whose steps the recipe does not know, the warm-up
        is never more than a tenth."""
        if self.minutes is not None and self.period is None:
            return dataclasses.replace(self, warmup_steps=min(self.warmup_steps, steps // 10))
        if self.warmup_steps < steps:
            return self
        whole = self.warmup_steps + self.period if self.period else 10 * self.warmup_steps
        period = None if self.period is None else max(1, self.period * steps // whole)
        return dataclasses.replace(self, warmup_steps=self.warmup_steps * steps // whole, period=period)

    def with_block_size(self, size: int) -> Stage:
        """Return the stage with this block size. `batch_tokens` is rounded down to whole blocks, at least one."""
        return dataclasses.replace(self, block_size=size, batch_tokens=max(1, self.batch_tokens // size) * size)

    @property
    def peak_rates(self) -> dict[str, float]:
        """The peak learning rates, as they are logged: that of the maps separately, if they have their own and are not
        trained alone."""
        maps = self.map_learning_rate
        if maps is None or self.train == "maps":
            return {"learning_rate": self.learning_rate if maps is None else maps}
        return {"learning_rate": self.learning_rate, "map_learning_rate": maps}

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
    """Make a stage from parsed YAML."""
    where, known = f"stage {values['name']!r}: ", options_of(Stage)
    refuse_unknown(values, known, where)
    return Stage(**{name: known[name].read(value) for name, value in values.items()})
