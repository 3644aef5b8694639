"""What a call requires of a decoding step: rows, and the sizes of the buffers of each row."""

from __future__ import annotations

from typing import Any, NamedTuple

from t2r.generation.engine.choice import Choice
from t2r.generation.engine.request import Request
from t2r.generation.engine.step import DecodeStep

BLOCK = 256
"""The buffers of softmax layers hold a multiple of this number of tokens. When they grow, they at least double."""


class Room(NamedTuple):
    """What a call requires of a decoding step. Lengths are 0 without softmax attention of that kind."""

    rows: int
    length: int
    """Tokens in softmax layers."""
    source: int
    """Tokens of the source in softmax cross attention."""
    biases: int = 0
    """Tokens whose logits have a bias."""

    @classmethod
    def of(cls, step: DecodeStep | None) -> Room:
        if step is None:
            return cls(0, 0, 0)
        return cls(step.rows, step.max_length or 0, step.source_length or 0, step.biases)

    @classmethod
    def needed(cls, model: Any, request: Request, state: Any, choice: Choice | None = None) -> Room:
        """Return what a call requires."""
        length, source = total_length(request, state), request.source
        return cls(
            request.ids.shape[0],
            length if model.grows() else 0,
            source.shape[1] if source is not None and model.grows(cross=True) else 0,
            0 if choice is None else len(choice.biases),
        )

    def fits(self, step: DecodeStep | None) -> bool:
        """Return whether the buffers and the table of positions of a step are large enough."""
        own = Room.of(step)
        large_enough = self.length <= own.length and self.source <= own.source and self.biases <= own.biases
        return step is not None and large_enough and not step.outdated


def total_length(request: Request, state: Any) -> int:
    """Return the maximum length of a sequence, including the tokens of a state."""
    return int(request.max_length + (0 if state is None else state.get_seq_length() - request.read))


def enlarged(needed: int, before: int, block: int = BLOCK) -> int:
    """Return the length of a buffer: that of `before` if it is long enough, otherwise a larger multiple of `block`."""
    return before if needed <= before else max(-(-needed // block) * block, 2 * before)
