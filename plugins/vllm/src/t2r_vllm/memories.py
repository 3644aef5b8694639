"""The memories of the rows of a step, in pages of vLLM's cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from t2r.attention.memories import Shape, StateMemory, WindowMemory
from t2r.ops import Beside, Features, Rule, Slots, State, Sum


def copied(pages: Tensor, slots: Slots) -> Tensor:
    """Return what the rows have in these pages, and zeros for rows that are new."""
    return pages[slots.at].masked_fill(slots.new.view(-1, *[1] * (pages.dim() - 1)), 0)


class PagedState(StateMemory):
    """The states of the rows. A step of one token changes them where they are."""

    state: State

    def __init__(self, pages: State, slots: Slots) -> None:
        super().__init__(pages, fixed=True)
        self.slots = slots

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: Rule,
        *,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
    ) -> Any:
        if k.shape[2] == 1 and isinstance(rule, Sum):
            how: dict[str, Any] = {"features": features, "beside": beside, "normalized": normalized}
            out, _ = rule.step(q, k, v, self.state, mask=mask, inplace=True, slots=self.slots, **how)
            return out
        rows = self.state.map(lambda x: copied(x, self.slots))
        out, rows = rule.parallel(q, k, v, state=rows, mask=mask, starts=starts, normalized=normalized)
        for pages, x in zip(self.state, rows, strict=True):
            if pages is not None and x is not None:
                pages[self.slots.at] = x
        return out


class PagedWindow(WindowMemory):
    """The windows of the rows. They are copied, and `write_back` puts them into their pages again.

    Args:
        places: where the windows of the heads are (`Shape.layout`).
        seen: the number of tokens that each row has read.
    """

    def __init__(self, shape: Shape, pages: tuple[Tensor, Tensor], places: Tensor, slots: Slots, seen: Tensor) -> None:
        super().__init__(shape)
        self.pages, self.slots = pages, slots
        self.keys, self.values = (copied(x, slots) for x in pages)
        self.seen, self.layout, self.fixed = seen, places, True

    def write_back(self) -> None:
        for pages, x in zip(self.pages, (self.keys, self.values), strict=True):
            assert x is not None
            pages[self.slots.at] = x
