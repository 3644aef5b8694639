"""Masks of a recurrence: which positions are padding, and where documents begin.

A mask is None or has shape `[batch, keys]`. It is boolean (true for real tokens), or holds the document number of each
position.
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
    """Create the mask. transformers calls this once per forward and passes the result to every layer."""
    if use_vmap:
        raise T2RError(
            "this model combines its causal mask with another one (a bidirectional prefix, image tokens): "
            "recurrent layers are causal and do not support that"
        )
    if isinstance(q_offset, Tensor) and q_length == 1:
        mask = fixed_mask(q_offset, kv_length, attention_mask)
        # Some models reshape the mask to their batch size, which would split a row that stands for all.
        return None if mask is None else mask.expand(batch_size, -1)
    if attention_mask is not None:
        # Inspecting the values synchronizes with the device, which is too slow for single tokens.
        if q_length > 1 and values_are_known() and bool(attention_mask.all()):
            return None
        return attention_mask
    if mask_function is None or q_length != kv_length or q_length == 1:
        return None
    # Only the mask function of transformers knows about restarting position ids. A document begins where a position
    # may not attend to the previous one.
    rows = torch.arange(batch_size, device=device)[:, None]
    columns = torch.arange(1, q_length, device=device)[None, :]
    begins = ~mask_function(rows, 0, columns, columns - 1)
    if values_are_known() and not bool(begins.any()):
        return None
    return (pad(begins.long(), (1, 0)).cumsum(1) + 1).expand(batch_size, -1)


def given_mask(*sizes: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the padding mask, without inspecting it. Positions that restart are not noticed."""
    return attention_mask


def values_are_known() -> bool:
    """Return whether tensor values may be inspected. They may not during compilation or CUDA graph capture."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def fixed_mask(position: Tensor, size: int, mask: Tensor | None) -> Tensor | None:
    """Return the mask of one token over the buffers of a static cache. Its shape does not depend on the length so far.

    `position` is the number of previous tokens. A static cache with recurrent layers only has size 1."""
    if size == 1:
        # A slice would keep the stride of the growing mask, and a compiled step would recompile for each token.
        return None if mask is None else mask[:, -1:].contiguous()
    seen = torch.arange(size, device=position.device)[None] <= position
    if mask is not None and mask.shape[1] < size:
        mask = pad(mask, (0, size - mask.shape[1]))
    # A sliding window has the keys of the last tokens only.
    return seen if mask is None else seen & mask[:, -size:].bool()


class Padding(NamedTuple):
    """The padding of each row: `tokens` padding tokens beginning at `start`, `[batch]` each."""

    start: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Padding:
        """Convert a padding mask `[batch, tokens]`, without device synchronization.

        Rows with padding in several places cannot be represented. Their start is -1, and `check` refuses them."""
        hidden = mask == 0
        count = hidden.sum(dim=1)
        first = hidden.int().argmax(dim=1)
        last = mask.shape[1] - 1 - hidden.flip(1).int().argmax(dim=1)
        start = torch.where((count == 0) | (last - first + 1 == count), first, -1)
        return cls(torch.where(count == 0, 0, start), count)

    def followed_by(self, other: Padding, length: int) -> Padding:
        """Return the padding of these `length` tokens and of those after them, without device synchronization."""
        both, after = self.tokens + other.tokens, length + other.start
        joined = (self.start >= 0) & (other.start >= 0) & (self.start + self.tokens == after)
        start = torch.where(other.tokens == 0, self.start, torch.where(joined, self.start, -1))
        alone = torch.where(other.start < 0, -1, after)
        return Padding(torch.where((self.tokens == 0) & (other.tokens > 0), alone, start), both)

    def cropped(self, length: int) -> Padding:
        """Return the padding of the first `length` tokens. That of a row in several places stays unknown."""
        start = self.start.clamp_max(length)
        return Padding(start, torch.where(start < 0, self.tokens, torch.minimum(self.tokens, length - start)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Padding:
        return Padding(function(self.start), function(self.tokens))

    def mask(self, length: int) -> Tensor:
        """Return the padding mask over `length` positions."""
        self.check()
        column = torch.arange(length, device=self.start.device)
        hidden = (column >= self.start[:, None]) & (column < (self.start + self.tokens)[:, None])
        return (~hidden).long()

    @property
    def is_known(self) -> bool:
        """Whether the padding of every row is in one place."""
        return bool((self.start >= 0).all())

    def check(self) -> None:
        if not self.is_known:
            raise T2RError("a state with padding in several places of a row cannot be split, saved or continued")


def padding_and_starts(
    mask: Tensor | None, time: int, position: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Convert a mask to the `mask` and `starts` of `t2r.ops`, for the last `time` positions.

    For a single token and a mask of fixed size, `position [batch]` selects the position."""
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


class Rows(NamedTuple):
    """The rows of a batch with real tokens at their front, so that the distance of two tokens is that of their places.

    Windows count tokens, not padding."""

    mask: Tensor | None
    """`[batch, time]`, true for real tokens, which come first. None: there is no padding."""
    order: Tensor | None
    """The place from which each token comes. None: all stay where they are."""
    starts: Tensor | None
    """Where documents begin. None: there is one in each row."""
    origin: Tensor | None
    """Where the document of each token begins."""

    @classmethod
    def of(cls, padding: Tensor | None, starts: Tensor | None) -> Rows:
        """Arrange rows by the results of `padding_and_starts`."""
        if starts is not None:
            places = torch.arange(starts.shape[1], device=starts.device)
            return cls(None, None, starts, torch.where(starts, places, 0).cummax(1).values)
        if padding is None or padding.shape[1] == 1:
            return cls(padding, None, None, None)
        order = (~padding).int().argsort(dim=1, stable=True)
        return cls(padding.gather(1, order), order, None, None)

    def packed(self, x: Tensor) -> Tensor:
        """Arrange the tokens of `[batch, heads, time, size]`."""
        return x if self.order is None else x.gather(2, self.order[:, None, :, None].expand(x.shape))

    def unpacked(self, x: Tensor) -> Tensor:
        """Undo `packed`."""
        if self.order is None:
            return x
        return torch.zeros_like(x).scatter(2, self.order[:, None, :, None].expand(x.shape), x)


def new_token_mask(mask: Tensor | None, input_ids: Tensor, read: int = 0) -> Tensor:
    """Return the padding mask of new tokens, from a mask of them, or of all tokens if some were `read` before."""
    if mask is None:
        return torch.ones_like(input_ids)
    rows, tokens = input_ids.shape
    if mask.shape not in ((rows, tokens), (rows, read + tokens)):
        wanted = f"that of the new tokens, or of all tokens, {(rows, read + tokens)}" if read else "that of the prompts"
        raise T2RError(f"attention_mask has shape {tuple(mask.shape)}: it must be {(rows, tokens)}, {wanted}")
    return mask[:, -tokens:]


def documents_from_positions(position_ids: Tensor | None, batch: int) -> Tensor | None:
    """Return the document number of each token from restarting position ids, or None if they do not restart.

    For families whose mask does not depend on position ids (OPT). It synchronizes with the device, so call it once per
    forward."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return None
    if values_are_known() and not bool((position_ids.diff(dim=1) != 1).any()):
        return None
    return number_documents(position_ids, batch)


def number_documents(position_ids: Tensor, batch: int) -> Tensor:
    return (pad((position_ids.diff(dim=1) != 1).long(), (1, 0)).cumsum(1) + 1).expand(batch, -1)


def refuse_full_mask(mask: Any) -> None:
    if isinstance(mask, dict):  # one per layer type, as `generate` prepares them for a static cache
        for part in mask.values():
            refuse_full_mask(part)
        return
    if mask is not None and mask.dim() != 2:
        raise T2RError(
            f"a {mask.dim()}-D attention mask is not supported by recurrent layers: pass a padding mask "
            "[batch, tokens] (for packed documents: position_ids that restart)"
        )
