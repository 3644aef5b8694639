"""The learning rate as a function of the step, and nothing else: what a test can compare with a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from t2r.errors import T2RError

KINDS = ("constant", "linear", "cosine", "inverse_sqrt", "cosine_restarts")


@dataclass(frozen=True)
class Schedule:
    """Warm up linearly from `warmup_init` to `peak` over `warmup_steps`, then follow the kind to step `steps`.

    `linear` and `cosine` end at `floor`; `inverse_sqrt` falls with the root of the step; `cosine_restarts` is
    fairseq's: cycles of `period` steps, each `period_mult` times as long as the one before and between rates `shrink`
    times as high.
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
            raise T2RError("schedule cosine_restarts needs a period, in steps, at least 1")
        if self.warmup_steps < 0:
            raise T2RError(f"warmup_steps is {self.warmup_steps}: it cannot be negative")
        if self.period_mult < 1:
            raise T2RError(f"period_mult is {self.period_mult}: a cycle cannot be shorter than the one before")

    def at(self, step: float) -> float:
        """The rate of step `step`, counted from 0; by the clock also between two steps."""
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
