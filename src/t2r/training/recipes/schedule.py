"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from t2r.errors import T2RError

KINDS = ("constant", "linear", "cosine", "inverse_sqrt", "cosine_restarts")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from `warmup_init` to `peak` over `warmup_steps`, then a schedule of the given kind up to `steps`.

    `linear` and `cosine` end at `floor`. `inverse_sqrt` falls with the square root of the step. `cosine_restarts` is
    fairseq's: cycles of `period` steps; each cycle is `period_mult` times as long as the one before, and its learning
    rates are multiplied by `shrink`.
    """

    kind: str
    peak: float
    steps: int
    warmup_steps: int = 0
    warmup_init: float = 0.0
    floor: float = 0.0
    period: int | None = None
    period_mult: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise T2RError(f"no schedule {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.kind == "cosine_restarts" and (self.period is None or self.period < 1):
            raise T2RError("schedule cosine_restarts requires a period of at least 1 step")
        if self.warmup_steps < 0:
            raise T2RError(f"warmup_steps must be at least 0; got {self.warmup_steps}")
        if self.period_mult < 1:
            raise T2RError(f"period_mult must be at least 1; got {self.period_mult}")

    def at(self, step: float) -> float:
        """Return the learning rate at `step`, from 0. With a time budget, steps can be fractional."""
        if step < self.warmup_steps:
            return self.warmup_init + (self.peak - self.warmup_init) * step / self.warmup_steps
        since = step - self.warmup_steps
        if self.kind == "cosine_restarts":
            return self.restarted(since)
        if self.kind == "inverse_sqrt":
            return self.peak * math.sqrt(max(1, self.warmup_steps) / max(1, step))
        done = min(1.0, since / max(1, self.steps - self.warmup_steps))
        if self.kind == "linear":
            return self.floor + (self.peak - self.floor) * (1 - done)
        if self.kind == "cosine":
            return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak

    def restarted(self, since: float) -> float:
        length, cycle = float(self.period or 0), 0
        while since >= length:
            since, length, cycle = since - length, length * self.period_mult, cycle + 1
        low, high = self.floor * self.shrink**cycle, self.peak * self.shrink**cycle
        return low + (high - low) * 0.5 * (1 + math.cos(math.pi * since / length))
