"""Ctrl-C (SIGINT) or SIGTERM during a stage: a checkpoint of the last whole step is saved before the process stops.

The step that is running is abandoned: on a CPU it can take minutes. Its forward and backward passes change nothing but
random states and gradients, so the checkpoint is that of the end of the step before, and the stage is resumed exactly
there. A second signal stops at once, without a checkpoint. With several processes, signals do what they did before.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from transformers import TrainerCallback

from t2r.training.loop import processes

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised where a stage can stop: between two updates of its weights."""


class Interruption(TrainerCallback):
    """As a context manager, it replaces the handlers of signals. As a callback, it says where a stage can stop.

    Args:
        anywhere: a step can be left at any place. On a GPU, it can be left only between its forward passes, because a
            capture of a step must not be left.
    """

    def __init__(self, anywhere: bool) -> None:
        self.anywhere = anywhere
        self.number: int | None = None
        """The signal that was received."""
        self.computing = False
        """Whether a forward or backward pass runs, which changes no weights."""
        self.before: dict[int, Any] = {}
        self.states: tuple[Any, ...] | None = None

    def __enter__(self) -> Self:
        if processes.count() == 1 and threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Nothing is logged here, where another message may be half written."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        if self.computing and self.anywhere:
            raise Interrupted

    def stop(self) -> NoReturn:
        """Raise what ends the process: KeyboardInterrupt, or SystemExit with the exit code of a terminated process."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    # --- Places where a stage can stop ----------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states = random_states()
        self.computing = True
        self.check()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.computing = False

    def check(self) -> None:
        if self.number is not None:
            raise Interrupted

    def rewind(self) -> None:
        """Restore the random states of the end of the last whole step."""
        self.computing = False
        if self.states is not None:
            restore(*self.states)


def random_states() -> tuple[Any, ...]:
    """Return the random states that a checkpoint contains."""
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpu


def restore(of_python: Any, of_numpy: Any, of_torch: Any, on_gpu: Any) -> None:
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
