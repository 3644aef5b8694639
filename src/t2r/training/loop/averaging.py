"""The mean of the weights at several points at the end of a stage. The paper averages the checkpoints of the last five
epochs.

The points are the end of the stage and those one, two, ... epochs before it. If epochs are long, the points are closer
together, evenly spaced over the last quarter of the stage: earlier weights would make the mean worse. A running sum in
float32 is kept and saved with checkpoints, so a resumed stage has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

FILE = "average.safetensors"
"""The file in a checkpoint: the sum, and how many points it has."""
LATE = 4
"""The points lie in the last of this many parts of a stage."""


def averaging_points(steps: int, count: int, epoch_steps: float) -> list[int]:
    """Return the steps after which weights are added, in order. The last is the end of the stage.

    Args:
        steps: number of steps of the stage.
        count: number of points; fewer if the stage has too few steps.
        epoch_steps: number of steps per epoch.
    """
    spacing = max(1.0, min(epoch_steps, steps / (LATE * count)))
    return sorted({steps - round(k * spacing) for k in range(count) if round(k * spacing) < steps})


class Average(TrainerCallback):
    """Adds up the weights at the points of a stage.

    Args:
        weights: the trained parameters by name, tied ones once.
        points: as returned by `averaging_points`.
        position: a function that returns how far the stage is, in steps of the plan, after a number of steps. With a
            time budget this depends on the time.
    """

    def __init__(self, weights: Mapping[str, Tensor], points: list[int], position: Callable[[int], float]) -> None:
        self.weights, self.points, self.position = weights, points, position
        self.passed = 0
        """Number of points that were passed."""
        self.count = 0
        """Number of weights in the sum: fewer than points if one step passed two."""
        self.sums: dict[str, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reached = self.position(state.global_step)
        passed = sum(point <= reached for point in self.points)
        if passed > self.passed:
            self.passed = passed
            self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Add the present weights to the sum."""
        for name, weight in self.weights.items():
            if name in self.sums:
                self.sums[name] += weight
            else:
                self.sums[name] = weight.detach().to(torch.float32, copy=True)
        self.count += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the weights by the mean. The last weights are part of it, also if the time was over early."""
        if self.passed < len(self.points):
            self.passed = len(self.points)
            self.add()
        for name, weight in self.weights.items():
            weight.copy_(self.sums[name] / self.count)
        self.sums.clear()

    def save(self, folder: Path) -> None:
        tensors = {name: x.cpu().contiguous() for name, x in self.sums.items()}
        save_file(tensors, folder / FILE, {"count": str(self.count), "passed": str(self.passed)})

    def load(self, folder: Path) -> None:
        with safe_open(folder / FILE, "pt") as file:
            about = file.metadata()
        self.count, self.passed = int(about["count"]), int(about["passed"])
        self.sums = {name: x.to(self.weights[name].device) for name, x in load_file(folder / FILE).items()}
