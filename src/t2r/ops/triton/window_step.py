"""One decoding step of the windows of a layer, and of the states of what has left them, in one kernel launch.

The time of such a step is the longest way of one program, so rings are divided into blocks, with a program for each. A
program for each query head has the new token and the state. The last program of a key head joins the parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from t2r.ops.triton.blocks import block, inner, on_device, precision
from t2r.ops.triton.launch import Arguments, Repeated
from t2r.ops.triton.window_kernel import BESIDE, step
from t2r.ops.windows import Far

COLUMNS = 8
"""The fewest columns of a matrix product, so the fewest query heads of a program. Missing ones are zeros."""
JOINED = 8192
"""The numbers that are joined at a time: in registers."""
PARTS_AT_ONCE = 16
"""Parts that are joined at a time: few models have more."""
TOKEN = 1 << 16
"""A program with a token is counted by this number more, in the same count. A key head has fewer programs."""
_step = Repeated(step)


class Form(NamedTuple):
    """How the programs of a step are made."""

    block: int
    """Keys of a program."""
    warps: int


FORMS = {16: Form(128, 2), 8: Form(128, 2)}
"""By the bits of keys and values."""


@lru_cache
def most_parts(windows: tuple[int, ...], sinks: int, size: int) -> int:
    """Return how many parts the head with the longest ring has, if blocks have this size."""
    return 1 + max(-(-(own + sinks) // size) if own else 0 for own in windows)


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
    cos, sin = (None, None) if rotation is None else (inner(x.expand(rows, 1, dim)) for x in rotation)
    form, group = FORMS[16 if scales is None else 8], heads // key_heads
    most = most_parts(windows, sinks, form.block)
    of_value = block(value, 256)
    out = torch.empty(rows, heads, 1, value, dtype=v.dtype, device=q.device)
    logs = torch.empty(rows, heads, 1, dtype=torch.float32, device=q.device)
    work = torch.empty(rows * heads * most * (of_value + BESIDE.value), dtype=torch.float32, device=q.device)
    left = None
    if leaves:
        valid = torch.empty(rows, key_heads, 1, dtype=torch.bool, device=q.device)
        left = (torch.empty_like(k), torch.empty_like(v), valid)
    gone = (None, None, None) if left is None else (*left[:2], left[2].view(torch.uint8))
    seed = 0 if far is None or far.draws is None else far.draws.seed

    def arguments() -> Arguments:
        together = int(triton.next_power_of_2(group))
        joined = min(max(1, JOINED // (PARTS_AT_ONCE * of_value)), together)
        strides, constants = of_states(far)
        integers = (
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            0 if cos is None else cos.stride(0),
            *keys.stride()[:2], *values.stride()[:2], 0 if scales is None else scales.stride(0),
            *strides, key_heads, group, sinks, most, seed, scaling,
        )  # fmt: skip
        constants |= dict(
            DIM=dim, VALUE=value, BD=block(dim, 256), BV=of_value, BN=form.block, BG=max(COLUMNS, together),
            BP=PARTS_AT_ONCE, BJ=joined, JOINS=-(-group // joined),
            HOW=precision(q, keys) if scales is None else precision(q), EIGHT=scales is not None,
            PLACED=places is not None, ROTATED=rotation is not None, LEAVES=leaves, TOKEN=TOKEN,
        )  # fmt: skip
        return (heads + len(table) - key_heads, rows), integers, constants

    pairs = None if scales is None else scales.view(torch.int32)
    given = (q, k, v, cos, sin, keys, values, scales, pairs, seen, table, places, work, arrived, out, logs)
    kind = (form, windows, sinks, scaling, seed, None if far is None else far.features[:4])
    with on_device(q):
        _step.launch((*given, *gone, *tensors_of(far)), kind, arguments, num_warps=form.warps)
    return Step(out, logs, left)


def tensors_of(far: Far | None) -> tuple[Tensor | None, ...]:
    """Return the tensors of states that the kernel has."""
    if far is None:
        return (None,) * 11
    at, new = (None, None) if far.slots is None else (far.slots.at, far.slots.new.view(torch.uint8))
    decay = None if far.decay is None else inner(far.decay)
    counts = None if far.draws is None else inner(far.draws.counts)
    return far.state.s, far.state.z, decay, far.numbers, at, new, *far.features[4:], counts


def of_states(far: Far | None) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the strides and constants of the kernel that states have."""
    if far is None:
        names = ("STATE", "NUMBERED", "SLOTTED", "HAS_DECAY", "HAS_BIAS", "WEIGHS", "WEIGHS_QUERIES", "DRAWN")
        return (0,) * 6, dict.fromkeys(names, False) | {"FEATURE": 1, "BF": 1, "STATES": 1, "ACTIVATION": ""}
    s, z, how = far.state.s, far.state.z, far.features
    strides = (*s.stride()[:3], *z.stride()[:2], 0 if far.decay is None else inner(far.decay).stride(0))
    constants = dict(
        FEATURE=how.size, BF=block(how.size, 256), STATE=True, NUMBERED=far.numbers is not None,
        SLOTTED=far.slots is not None, HAS_DECAY=far.decay is not None, HAS_BIAS=how.q_bias is not None,
        ACTIVATION=how.activation, WEIGHS=how.weighs_keys, WEIGHS_QUERIES=how.weighs_queries,
        DRAWN=far.draws is not None, STATES=s.shape[1],
    )  # fmt: skip
    return strides, constants
