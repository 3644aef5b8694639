"""The memories of the rows of a step, in pages of vLLM's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.attention.memories import Shape, StateMemory, WindowMemory
from t2r.ops import Beside, Features, Rule, Slots, State, Sum, Sums, Windows
from t2r.ops.rings import How
from t2r.ops.windows import Left


def copied(pages: Tensor, at: Tensor, missing: Tensor) -> Tensor:
    """Return what the rows have in these pages, and zeros for what they have not: rows, or slots of them."""
    return pages[at].masked_fill(missing.view(*missing.shape, *[1] * (pages.dim() - missing.dim())), 0)


class PagedState(StateMemory):
    """The states of the rows. A step of one token changes them where they are."""

    state: State
    slots: Slots

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
        rows = self.state.map(lambda x: copied(x, self.slots.at, self.slots.new))
        out, rows = rule.parallel(q, k, v, state=rows, mask=mask, starts=starts, normalized=normalized)
        for pages, x in zip(self.state, rows, strict=True):
            if pages is not None and x is not None:
                pages[self.slots.at] = x
        return out


class PagedWindow(WindowMemory):
    """The windows of the rows. A step of one token changes them where they are, if it is one kernel (on a GPU);
    otherwise they are copied and written back.

    Args:
        table: what the programs of a step in one kernel have, made by an earlier step. None: there was none.
        seen: the number of tokens that each row has read.
    """

    def __init__(
        self, shape: Shape, pages: tuple[Tensor, ...], table: Tensor | None, slots: Slots, seen: Tensor
    ) -> None:
        super().__init__(shape)
        self.pages, self.slots = pages, slots
        self.hold(pages)
        self.lengths, self.table, self.fixed, self.places = seen, table, True, slots.at

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, mask: Tensor | None, how: How, *, leaves: bool
    ) -> tuple[list[Sums], Left | None]:
        if k.shape[2] == 1 and mask is None and self.steps_at_once(q, v, how):
            return super().attend(q, k, v, windows, mask, how, leaves=leaves)
        missing = self.missing()
        self.hold([copied(x, self.slots.at, missing) for x in self.pages])
        found = super().attend(q, k, v, windows, mask, how, leaves=leaves)
        for pages, x in zip(self.pages, self.held, strict=True):
            pages[self.slots.at] = x
        return found

    def missing(self) -> Tensor:
        """Return which slots have no token of their row, `[rows, slots]`.

        A step in one kernel leaves there what another sequence had. A weight of zero does not remove NaN.
        """
        assert self.lengths is not None
        each = [
            torch.arange(size + self.shape.sinks, device=self.lengths.device)
            for size, heads in self.shape.rings
            for _ in heads
        ]
        return torch.cat(each) >= self.lengths[:, None]
