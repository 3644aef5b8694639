"""One decoding step of the windows of a layer, and of the states of what has left them, in one kernel launch.

The time of such a step is the longest way of one program, so rings are divided into blocks, with a program for each. A
program for each head has the new token and the state. The last program of a head joins the parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from t2r.ops.triton.blocks import block, inner, on_device, precision
from t2r.ops.triton.decode import at_once
from t2r.ops.triton.window_kernel import BESIDE, step
from t2r.ops.windows import Far

ROWS = 16
"""The fewest rows of a matrix product, so the fewest query heads of a program. Missing ones are zeros."""
JOINED = 8192
"""The numbers that are joined at a time: in registers."""
PARTS_AT_ONCE = 32


class Form(NamedTuple):
    """How the programs of a step are made."""

    block: int
    """Keys of a program."""
    warps: int


FORMS = {16: Form(128, 2), 8: Form(128, 2)}
"""By the bits of keys and values."""


@lru_cache
def parts_of(windows: tuple[int, ...], sinks: int, size: int) -> tuple[int, int]:
    """Return how many programs each row has, and how many parts the largest head has, if blocks have this size."""
    blocks = [-(-(own + sinks) // size) if own else 0 for own in windows]
    return len(windows) + sum(blocks), 1 + max(blocks)


class Step(NamedTuple):
    """The result of a step."""

    means: Tensor
    """`[rows, heads, 1, value]`."""
    logs: Tensor
    """The logarithms of the sums of weights, `[rows, heads, 1]`. Minus infinity: none."""
    left: tuple[Tensor, Tensor, Tensor] | None
    """The keys and values that left, and whether they did."""


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: tuple[Tensor, ...],
    seen: Tensor,
    table: Tensor,
    arrived: Tensor,
    *,
    windows: tuple[int, ...],
    sinks: int,
    scaling: float,
    places: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    far: Far | None = None,
    leaves: bool = False,
) -> Step:
    """Store the key and value of one token for each row, and attend to the window of each key head and to its state.

    Args:
        q, k, v: queries `[rows, heads, 1, dim]`, and keys and values `[rows, key_heads, 1, …]` of one token.
        held: buffers `[rows, slots, …]`, the ring of one head after the other: keys, values and, of those that are
            stored in 8 bits, scales `[rows, slots, 2]`.
        seen: how many tokens each row has read before.
        table: `[programs, 4]`, what each program of a row has: its key head, the number of its part, the first slot of
            the ring of the head, and the window. Part 0 is the token and the state, the others have blocks of the ring.
        arrived: zeros in int32, one for each row and key head. Zeros again after the step, so that the next one can
            have the same. Steps that run at the same time cannot.
        windows: the windows of the key heads, on the host.
        sinks: sinks of heads with a window.
        places: `[rows]`, where the buffers of each row are, if there are those of more sequences. None: in their order.
        rotation: cosines and sines `[rows or 1, 1, dim]`, by which queries and keys are rotated first. The two halves
            of a head are its real and imaginary parts.
        far: the states of what has left the windows, which are advanced in place. None: there are none.
        leaves: return what leaves the windows.
    """
    q, k, v = inner(q), inner(k), inner(v)
    (rows, heads, _, dim), key_heads, value = q.shape, k.shape[1], v.shape[3]
    keys, values, *rest = held
    scales = rest[0] if rest else None
    cos, sin = (q, q) if rotation is None else (inner(x.expand(rows, 1, dim)) for x in rotation)
    form, group = FORMS[16 if scales is None else 8], heads // key_heads
    total, most = parts_of(windows, sinks, form.block)
    of_key, of_value = block(dim, 256), block(value, 256)
    out = torch.empty(rows, heads, 1, value, dtype=v.dtype, device=q.device)
    logs = torch.empty(rows, heads, 1, dtype=torch.float32, device=q.device)
    work = torch.empty(rows * heads * most * (of_value + BESIDE.value), dtype=torch.float32, device=q.device)
    left = None
    if leaves:
        valid = torch.empty(rows, key_heads, 1, dtype=torch.bool, device=q.device)
        left = (torch.empty_like(k), torch.empty_like(v), valid)
    old_k, old_v, valid = (out, out, out) if left is None else (*left[:2], left[2].view(torch.uint8))
    joined = min(max(1, JOINED // (PARTS_AT_ONCE * of_value)), triton.next_power_of_2(group))
    tensors, strides, constants = of_states(far, logs)
    feature: int = constants["FEATURE"]
    seed = 0 if far is None or far.draws is None else far.draws.seed
    queries = at_once(group, block(feature, 256), dim, of_value) if far is not None else min(group_of(group), ROWS)
    with on_device(q):
        step[(rows * total,)](
            q, k, v, cos, sin, keys, values, logs if scales is None else scales,
            logs if scales is None else scales.view(torch.int32), seen, table, seen if places is None else places,
            work, arrived, out, logs, old_k, old_v, valid, *tensors,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            0 if rotation is None else cos.stride(0),
            *keys.stride()[:2], *values.stride()[:2], 0 if scales is None else scales.stride(0),
            *strides, key_heads, group, sinks, total, most, seed, scaling,
            DIM=dim, VALUE=value, BD=of_key, BV=of_value, BN=form.block, BG=max(ROWS, group_of(group)),
            BQ=queries, CHUNKS=-(-group // queries), BP=PARTS_AT_ONCE, BJ=joined,
            JOINS=-(-group // joined), HOW=precision(q, keys) if scales is None else precision(q),
            EIGHT=scales is not None, PLACED=places is not None, ROTATED=rotation is not None, LEAVES=leaves,
            **constants, num_warps=form.warps,
        )  # fmt: skip
    return Step(out, logs, left)


def group_of(group: int) -> int:
    return int(triton.next_power_of_2(group))


def of_states(far: Far | None, unused: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return the arguments of the kernel that states have: tensors, strides and constants."""
    if far is None:
        constants = dict(
            FEATURE=1, BF=1, STATE=False, NUMBERED=False, SLOTTED=False, HAS_DECAY=False, HAS_BIAS=False,
            ACTIVATION="", WEIGHS=False, WEIGHS_QUERIES=False, DRAWN=False, STATES=1,
        )  # fmt: skip
        return (unused,) * 11, (0,) * 6, constants
    s, z, how = far.state.s, far.state.z, far.features
    at, new = (unused, unused) if far.slots is None else (far.slots.at, far.slots.new.view(torch.uint8))
    counts = unused if far.draws is None else inner(far.draws.counts)
    decay = unused if far.decay is None else inner(far.decay)
    maps = tuple(unused if x is None else x for x in how[4:])
    tensors = (s, z, decay, unused if far.numbers is None else far.numbers, at, new, *maps, counts)
    strides = (*s.stride()[:3], *z.stride()[:2], 0 if far.decay is None else decay.stride(0))
    constants = dict(
        FEATURE=how.size, BF=block(how.size, 256), STATE=True, NUMBERED=far.numbers is not None,
        SLOTTED=far.slots is not None, HAS_DECAY=far.decay is not None, HAS_BIAS=how.q_bias is not None,
        ACTIVATION=how.activation, WEIGHS=how.weighs_keys, WEIGHS_QUERIES=how.weighs_queries,
        DRAWN=far.draws is not None, STATES=s.shape[1],
    )  # fmt: skip
    return tensors, strides, constants
