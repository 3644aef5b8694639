"""The memory of a window: the keys and values of the last tokens and of the sinks, in ring buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from t2r.attention.memories.base import Memory, may_overwrite
from t2r.attention.memories.shape import Shape
from t2r.ops import Far, Sums, Windows, window_attention
from t2r.ops.rings import How, Ring
from t2r.ops.stored import read, stored
from t2r.ops.windows import Left, steps_at_once

BUFFERS = ("keys", "values", "scales")
"""The names of what is stored of tokens. Only windows in 8 bits have scales."""


def table_of(shape: Shape, device: torch.device) -> Tensor:
    """Return what the programs of a step in one kernel have. It is made of numbers, which captured calls cannot do."""
    from t2r.ops.triton.window_step import FORMS

    return shape.programs(FORMS[shape.nbits].block, device)


class WindowMemory(Memory):
    """The windows of a layer. `keys` and `values` are `[rows, slots, dim]`, one ring after the other. Those in 8 bits
    have `scales [rows, slots, 2]`.

    Padding is not stored, so rows are independent of their padding. `seen [rows]` is the number of tokens of each row,
    without padding. A fixed memory derives it from the `lengths` of its cache, which count padding."""

    names = (*BUFFERS, "seen")
    integers = ("keys", "values", "seen")

    def __init__(self, shape: Shape, *, held: Sequence[Tensor] = (), lengths: Tensor | None = None) -> None:
        self.shape = shape
        self.hold(held)
        self.fixed = bool(held)
        self.counted: Tensor | None = None
        """The number of tokens of each row of a memory that is not fixed."""
        self.lengths = lengths
        self.skipped = None if lengths is None else torch.zeros_like(lengths)
        """The padding that is among the `lengths` of a fixed memory. None: there never is any, which saves an
        operation."""
        self.table: Tensor | None = None
        """What the programs of a step in one kernel have."""
        self.places: Tensor | None = None
        """Where the buffers of each row are, if they lie among those of other sequences: only a step in one kernel
        finds them there."""
        self.ones: Tensor | None = None
        """The denominators of a step in one kernel, kept because to make them is a kernel, too."""
        self.arrived: Tensor | None = None
        """What a step in one kernel counts its programs in: zeros after each step. It belongs to the buffers, because
        steps that run at the same time cannot share it any more than these."""
        self.before: dict[str, Tensor] | None = None
        self.added: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def hold(self, held: Sequence[Tensor]) -> None:
        """Take buffers."""
        self.keys: Tensor | None
        self.values: Tensor | None
        self.scales: Tensor | None
        self.keys, self.values, self.scales, *_ = (*held, None, None, None)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The buffers. Empty before the first token."""
        return tuple(x for x in (self.keys, self.values, self.scales) if x is not None)

    @property
    def overwrites(self) -> bool:
        """Whether a step writes into the buffers."""
        return self.keys is not None and (self.fixed or (may_overwrite(self.keys) and not self.recording))

    @property
    def seen(self) -> Tensor | None:
        """The number of tokens of each row, `[rows]`. None before the first token."""
        if self.lengths is None:
            return self.counted
        return self.lengths if self.skipped is None else self.lengths - self.skipped

    # --- Attention ------------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, mask: Tensor | None, how: How, *, leaves: bool
    ) -> tuple[list[Sums], Left | None]:
        """Store new tokens and attend to the window of each. Real tokens are at the front of their rows.

        Args:
            mask: `[rows, time]`, false for padding after the real tokens. None: there is none.
            leaves: return also what leaves the window at each new position, for a recurrent state.

        Returns sums over the new tokens and over those before, which belong together.
        """
        first = self.keys is None
        if self.keys is None:
            self.hold(self.shape.empty(k, v))
            self.counted = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
        assert self.keys is not None
        how = how._replace(inplace=self.overwrites)
        if self.recording:
            if not self.added:
                self.before = dict(self.tensors())
            self.added.append((k, v, mask))
        seen = self.seen
        assert seen is not None
        left: Left | None
        if k.shape[2] == 1:
            sums, left = self.step(q, k, v, mask, how)
            found = [sums]
        else:
            # Earlier tokens are before the first place, and the sinks may be among them.
            origin = None if first else -seen[:, None].expand(-1, k.shape[2])
            near = self.shape.rounded(k, v)
            found = [window_attention(q, *near, windows, scaling=how.scaling, softcap=how.softcap, origin=origin)]
            if not first:
                found.append(self.past(q, how))
            left = self.leaving(*near) if leaves else None
            self.extend(k, v, mask, how)
        if not self.fixed:
            self.counted = seen + (k.shape[2] if mask is None else mask.sum(1))
        elif mask is not None and self.skipped is not None:
            self.skipped.add_((~mask).sum(1))
        return found, left

    def step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: How) -> tuple[Sums, Left]:
        assert self.seen is not None
        if mask is None and self.steps_at_once(q, v, how):
            sums, left = self.step_at_once(q, k, v, how, leaves=True)
            assert left is not None
            return sums, left
        # What enters is rounded for all heads together, and what leaves is read together: fewer operations are faster.
        new = stored(k, v, self.shape.nbits)
        steps = []
        for ring, heads in self.rings():
            own = [self.of_heads(x, heads) for x in new]
            steps.append(ring.step(self.of_heads(q, heads), own, v.dtype, self.seen, mask, how))
        made, sums_of, old, valid = zip(*steps, strict=True)
        self.store(made, how)
        gone_k, gone_v = read(tuple(self.joined(parts) for parts in zip(*old, strict=True)), k.dtype)
        left = Left(gone_k, gone_v.to(v.dtype), self.joined(valid))
        return self.whole(sums_of), left if all(self.shape.sizes) else self.with_windowless(left, *read(new, k.dtype))

    def steps_at_once(self, q: Tensor, v: Tensor, how: How) -> bool:
        """Return whether one kernel computes a step of all windows, which writes into the buffers."""
        return self.overwrites and steps_at_once(q, v, how.softcap)

    def step_at_once(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        how: How,
        *,
        leaves: bool = False,
        far: Far | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Sums, Left | None]:
        """Store one token and attend to the window in one kernel, also to the states of what has left it.

        `rotation` are cosines and sines by which queries and keys are rotated first."""
        from t2r.ops.triton.window_step import window_step

        assert self.keys is not None and self.seen is not None
        if self.table is None or self.table.device != self.keys.device:  # not in a capture, which runs steps before
            self.table = table_of(self.shape, self.keys.device)
        count = q.shape[0] * k.shape[1]
        if self.arrived is None or self.arrived.shape[0] < count or self.arrived.device != q.device:
            self.arrived = torch.zeros(count, dtype=torch.int32, device=q.device)
        means, logs, left = window_step(
            q,
            k,
            v,
            self.held,
            self.seen,
            self.table,
            self.arrived,
            windows=self.shape.sizes,
            sinks=self.shape.sinks,
            scaling=how.scaling,
            places=self.places,
            rotation=rotation,
            far=far,
            leaves=leaves,
        )
        if self.ones is None or self.ones.shape != logs.shape or self.ones.device != logs.device:
            self.ones = torch.ones_like(logs)
        return Sums(means, self.ones, peak=logs), None if left is None else Left(*left)

    def attend_at_once(
        self, q: Tensor, k: Tensor, v: Tensor, how: How, far: Far | None, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The same, and count the token. Returns the averages of values, `[rows, heads, 1, value]`."""
        seen = self.seen
        assert seen is not None
        sums, _ = self.step_at_once(q, k, v, how, far=far, rotation=rotation)
        if not self.fixed:
            self.counted = seen + 1
        return sums.numerator

    def past(self, q: Tensor, how: How) -> Sums:
        assert self.seen is not None
        return self.whole([ring.attend(self.of_heads(q, heads), self.seen, how) for ring, heads in self.rings()])

    def leaving(self, k: Tensor, v: Tensor) -> Left:
        assert self.seen is not None
        left = [ring.leaving(self.of_heads(k, hs), self.of_heads(v, hs), self.seen) for ring, hs in self.rings()]
        gone = Left(*(self.joined(parts) for parts in zip(*left, strict=True)))
        return gone if all(self.shape.sizes) else self.with_windowless(gone, k, v)

    def with_windowless(self, gone: Left, k: Tensor, v: Tensor) -> Left:
        """Add the tokens of heads without a window, which leave at once."""
        at_once = torch.tensor([size == 0 for size in self.shape.sizes], device=k.device)[None, :, None]
        return Left(
            torch.where(at_once[..., None], k, gone.k), torch.where(at_once[..., None], v, gone.v), gone.valid | at_once
        )

    def extend(self, k: Tensor, v: Tensor, mask: Tensor | None, how: How) -> None:
        assert self.seen is not None
        count = torch.full_like(self.seen, k.shape[2]) if mask is None else mask.sum(1)
        self.store(
            [
                ring.extended(self.of_heads(k, heads), self.of_heads(v, heads), self.seen, count, how)
                for ring, heads in self.rings()
            ],
            how,
        )

    def store(self, made: Sequence[Ring], how: How) -> None:
        if not how.inplace:  # otherwise the rings are views of the buffers
            buffers = zip(*(ring.held for ring in made), strict=True)
            self.hold([torch.cat([x.flatten(1, 2) for x in parts], dim=1) for parts in buffers])

    def rings(self) -> list[tuple[Ring, tuple[int, ...]]]:
        """Return views of the buffers as rings, with their heads."""
        found, start = [], 0
        for size, heads in self.shape.rings:
            slots = size + self.shape.sinks
            end = start + len(heads) * slots
            held = tuple(x[:, start:end].unflatten(1, (len(heads), slots)) for x in self.held)
            found.append((Ring(held, size, self.shape.sinks), heads))
            start = end
        return found

    def whole(self, sums: Sequence[Sums]) -> Sums:
        """Join the sums of all rings. Heads without a window have no weight."""
        numerators, denominators, _, peaks = zip(*sums, strict=True)
        return Sums(self.joined(numerators), self.joined(denominators), peak=self.joined(peaks, -torch.inf))

    def of_heads(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """Return the heads of x that belong to these key heads."""
        key_heads = len(self.shape.sizes)
        if len(heads) == key_heads:
            return x
        group = x.shape[1] // key_heads
        return torch.cat([x[:, h * group : (h + 1) * group] for h in heads], dim=1)

    def joined(self, parts: Sequence[Any], fill: float = 0.0) -> Any:
        """Put the heads of all rings into the order of the key heads. `fill` is the value of heads without a window."""
        every, key_heads = [heads for _, heads in self.shape.rings], len(self.shape.sizes)
        if len(every[0]) == key_heads:
            return parts[0]
        group = parts[0].shape[1] // len(every[0])
        by_head: list[Any] = [torch.full_like(parts[0][:, :group], fill)] * key_heads
        for part, heads in zip(parts, every, strict=True):
            for i, h in enumerate(heads):
                by_head[h] = part[:, i * group : (i + 1) * group]
        return torch.cat(by_head, dim=1)

    # --- Rows -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        if self.keys is None:
            return {}
        held = dict(zip(BUFFERS, self.held, strict=False))
        return held if self.counted is None else held | {"seen": self.counted}

    def extra_tensors(self) -> list[Tensor]:
        return [*(self.before or {}).values(), *(x for added in self.added for x in added if x is not None)]

    def load(self, held: dict[str, Tensor]) -> None:
        if held:
            self.hold([held[name] for name in BUFFERS if name in held])
            self.counted = held["seen"].long()

    def check(self, held: dict[str, Tensor]) -> None:
        keys, values, seen = held["keys"], held["values"], held["seen"]
        if keys.dim() != 3 or values.shape[:2] != keys.shape[:2] or keys.shape[1] != self.shape.slots:
            raise ValueError("not a window of this size")
        expected = self.shape.empty(*(x.new_zeros(1, 1, 1, x.shape[2], dtype=torch.float32) for x in (keys, values)))
        names = [name for name in BUFFERS if name in held]
        if len(names) != len(expected):
            raise ValueError("not a window of this number of bits")
        for name, x in zip(names, expected, strict=True):
            if held[name].is_floating_point() != x.is_floating_point() or held[name].shape[1:] != x.shape[1:]:
                raise ValueError("not the numbers and scales of a window of this number of bits")
        if seen.shape != keys.shape[:1] or seen.is_floating_point() or bool((seen < 0).any()):
            raise ValueError("not numbers of tokens")

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.fixed:
            for x in (*self.tensors().values(), *(() if self.skipped is None else (self.skipped,))):
                x.copy_(function(x))
            return
        self.load({name: function(x) for name, x in self.tensors().items()})
        self.before = None if self.before is None else {name: function(x) for name, x in self.before.items()}
        self.added = [tuple(None if x is None else function(x) for x in added) for added in self.added]  # type: ignore[misc]

    def kind(self) -> tuple[Any, ...]:
        shapes = {name: tuple(x.shape[1:]) for name, x in self.tensors().items() if name != "seen"}
        return "window", self.shape, shapes

    def row_bytes(self, tokens: int) -> int:
        sinks = self.shape.sinks
        held = sum(len(heads) * min(tokens, size + sinks) for size, heads in self.shape.rings)
        return sum(held * x.shape[2] * x.element_size() for name, x in self.tensors().items() if name != "seen")

    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None) -> None:
        for name, own in self.tensors().items():
            new = getattr(other, name)
            own[rows] = new.index_select(0, index.to(new.device)).to(own)
        if self.skipped is not None:  # the lengths of rows that are put are those without padding
            self.skipped[rows] = 0

    def taken(self, row: int, tokens: int) -> dict[str, Tensor]:
        assert self.seen is not None
        return {name: x[row : row + 1].clone() for name, x in (self.tensors() | {"seen": self.seen}).items()}

    @property
    def recorded_tokens(self) -> int | None:
        return sum(k.shape[2] for k, _, _ in self.added)

    def crop(self, tokens: int) -> None:
        added, before = self.added, self.before
        self.added, self.before = [], None
        if not tokens or before is None:
            return
        self.load(before)
        assert self.seen is not None
        k = torch.cat([key for key, _, _ in added], dim=2)[:, :, :-tokens]
        v = torch.cat([value for _, value, _ in added], dim=2)[:, :, :-tokens]
        masks = [torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if m is None else m for key, _, m in added]
        mask = torch.cat(masks, dim=1)[:, :-tokens]
        order = (~mask).int().argsort(dim=1, stable=True)  # real tokens first
        k, v = (x.gather(2, order[:, None, :, None].expand(x.shape)) for x in (k, v))
        self.extend(k, v, mask, How(1.0))
        self.counted = self.seen + mask.sum(1)

    def reset(self, rows: Any = None) -> None:
        """Forget everything. The buffers of a fixed memory stay as they are: what is beyond a length is not read."""
        if not self.fixed:
            self.__init__(self.shape)  # type: ignore[misc]
        elif self.skipped is not None:
            self.skipped[slice(None) if rows is None else rows] = 0
