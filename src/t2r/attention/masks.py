"""What a recurrence must know of the other positions: which are padding, and where a new document begins.

So a mask here is None, or `[batch, keys]`: boolean (true: a real token), or the number of the document that each
position belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from t2r.errors import T2RError


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers builds once per forward and gives to every layer."""
    if use_vmap:
        raise T2RError(
            "this model combines its causal mask with one of its own (a prefix that sees itself, image tokens): "
            "a recurrence reads from left to right and cannot do that"
        )
    if isinstance(q_offset, Tensor) and q_length == 1:
        return fixed_mask(q_offset, kv_length, attention_mask)
    if attention_mask is not None:
        # Looking at the values costs a wait for the device: worth it for a whole text, not for one token.
        if q_length > 1 and values_are_known() and bool(attention_mask.all()):
            return None
        return attention_mask
    if mask_function is None or q_length != kv_length or q_length == 1:
        return None
    # Position ids that restart are known to transformers' mask function alone: ask it whether each position may
    # look at the one before it.
    rows = torch.arange(batch_size, device=device)[:, None]
    columns = torch.arange(1, q_length, device=device)[None, :]
    begins = ~mask_function(rows, 0, columns, columns - 1)
    if values_are_known() and not bool(begins.any()):
        return None
    return (pad(begins.long(), (1, 0)).cumsum(1) + 1).expand(batch_size, -1)


def values_are_known() -> bool:
    """Whether a decision may depend on the values of a tensor: not while a call is compiled, nor while it is captured
    as a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def fixed_mask(position: Tensor, size: int, mask: Tensor | None) -> Tensor | None:
    """The mask of one token over the buffers of a static cache, all of one shape however much was read; `position` is
    how many tokens came before. A static cache of recurrent layers alone has a size of 1: the token itself."""
    if size == 1:
        # A slice would keep the stride of the growing mask, and a compiled step would be compiled again for each token.
        return None if mask is None else mask[:, -1:].contiguous()
    seen = torch.arange(size, device=position.device)[None] <= position
    return seen if mask is None else seen & pad(mask.bool(), (0, size - mask.shape[1]))


class Padding(NamedTuple):
    """Which positions of each row are padding: so many tokens from `start` on, `[batch]` each."""

    start: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Padding:
        """From a padding mask `[batch, tokens]`. Nothing waits for the device: a row with padding in several places,
        which this cannot say, starts at -1 and is refused when it is asked for."""
        hidden = mask == 0
        count = hidden.sum(dim=1)
        first = hidden.int().argmax(dim=1)
        last = mask.shape[1] - 1 - hidden.flip(1).int().argmax(dim=1)
        start = torch.where((count == 0) | (last - first + 1 == count), first, -1)
        return cls(torch.where(count == 0, 0, start), count)

    def map(self, function: Callable[[Tensor], Tensor]) -> Padding:
        return Padding(function(self.start), function(self.tokens))

    def mask(self, length: int) -> Tensor:
        """The padding mask over so many positions."""
        self.check()
        column = torch.arange(length, device=self.start.device)
        hidden = (column >= self.start[:, None]) & (column < (self.start + self.tokens)[:, None])
        return (~hidden).long()

    def check(self) -> None:
        if bool((self.start < 0).any()):
            raise T2RError("a state with padding in several places of a row cannot be taken apart or continued")


def padding_and_starts(
    mask: Tensor | None, time: int, position: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into what `t2r.ops` asks for, for the last `time` positions; for one token of a mask of fixed size,
    for its `position [batch]`."""
    refuse_full_mask(mask)
    if mask is None:
        return None, None
    if position is not None and time == 1 < mask.shape[1]:
        mask = mask.expand(position.shape[0], -1).gather(1, position[:, None])
    mask = mask[:, -time:]
    if mask.dtype == torch.bool:
        return mask, None
    starts = torch.zeros_like(mask, dtype=torch.bool)
    starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
    return None, starts


def documents_from_positions(position_ids: Tensor | None, batch: int) -> Tensor | None:
    """The number of the document of each token, from position ids that restart; None where they do not.

    For families whose mask does not know the position ids (OPT). Looking at the values waits for the device: call it
    once per forward."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return None
    if values_are_known() and not bool((position_ids.diff(dim=1) != 1).any()):
        return None
    return number_documents(position_ids, batch)


def number_documents(position_ids: Tensor, batch: int) -> Tensor:
    return (pad((position_ids.diff(dim=1) != 1).long(), (1, 0)).cumsum(1) + 1).expand(batch, -1)


def refuse_full_mask(mask: Any) -> None:
    if isinstance(mask, dict):  # one for each kind of layer, as `generate` prepares them for a static cache
        for part in mask.values():
            refuse_full_mask(part)
        return
    if mask is not None and mask.dim() != 2:
        raise T2RError(
            f"a {mask.dim()}-D attention mask says more than which tokens are padding; a recurrence reads from left "
            "to right and takes a padding mask [batch, tokens] only (for packed documents: position_ids that restart)"
        )
