"""Helpers shared by the kernels: matrix products, the bounded division, and the masks of a chunk."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops import rounding
from t2r.ops.common import DENOMINATOR_FLOOR, SIGNED_FLOOR

SIZES = ["time", "chunks", "segments", "per", "slots", "heads", "key_heads", "group", "feature", "value"]
"""Arguments that kernels are not specialized on, so that one compilation serves all lengths. Triton would turn a size
of 1 into a constant, and triton 3.6 then generates matrix products on Hopper that read shared memory out of bounds."""
FLOOR = tl.constexpr(DENOMINATOR_FLOOR)
SIGNED = tl.constexpr(SIGNED_FLOOR)
HASH_FIRST, HASH_SECOND = tl.constexpr(rounding.FIRST), tl.constexpr(rounding.SECOND)
HASH_STRIDE, SMALLEST = tl.constexpr(rounding.STRIDE), tl.constexpr(rounding.SMALLEST)


@triton.jit
def dot(a, b, HOW: tl.constexpr, to=None):
    """Compute a matrix product in the precision named by `blocks.precision`, in float32, added to `to`."""
    if HOW == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), to)
    elif HOW == "bf16 emulated":
        return tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32), to, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), to, input_precision=HOW)


@triton.jit
def rounded(x, HOW: tl.constexpr):
    """Round to what `dot` multiplies, so that a sum of these numbers agrees with a product of them."""
    if HOW == "bf16" or HOW == "bf16 emulated":
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def narrow(x, HOW: tl.constexpr):
    """Convert to what `dot` multiplies, which takes half of the registers in bfloat16."""
    if HOW == "bf16":
        return x.to(tl.bfloat16)
    else:
        return rounded(x, HOW)


@triton.jit
def bounds(den, total, HAS_TOTAL: tl.constexpr):
    """Compute `safe_denominator`: the safe denominator, where it was bounded, and where all weights are zero."""
    if HAS_TOTAL:
        floor = tl.maximum(SIGNED * total, FLOOR)
        bounded = tl.abs(den) < floor
        safe = tl.where(bounded, tl.where(den < 0, -floor, floor), den)
        empty = total == 0
    else:
        bounded = den < FLOOR
        safe = tl.where(bounded, FLOOR, den)
        empty = den <= 0
    return safe, bounded, empty


@triton.jit
def divide(num, den, total, HAS_TOTAL: tl.constexpr):
    """Divide `num [rows, value]` by the bounded `den [rows]`."""
    safe, _, empty = bounds(den, total, HAS_TOTAL)
    return tl.where(empty[:, None], 0.0, num / safe[:, None])


@triton.jit
def mix(num, den, log, mean, other):
    """Divide the sums of a state, whose weights have the factor `exp(log)`, and add the `mean` of another memory, whose
    weights have the sum `exp(other)`. Where neither has weight, the result is zero."""
    far = tl.where(den > 0, tl.log(tl.maximum(den, FLOOR)) + log, float("-inf"))
    peak = tl.maximum(far, other)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    of_far, of_other = tl.exp(far - peak), tl.exp(other - peak)
    shared = tl.maximum(of_far + of_other, FLOOR)
    return num / tl.maximum(den, FLOOR) * (of_far / shared) + mean * (of_other / shared)


@triton.jit
def saturate(x, to: tl.constexpr):
    """Cast to the output dtype. float16 saturates, because a signed average can exceed the averaged values."""
    if to == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(to)


@triton.jit
def hashed(x):
    """Hash uint32 numbers, as `rounding.hashed` does."""
    x = (x ^ (x >> 16)) * HASH_FIRST
    x = (x ^ (x >> 15)) * HASH_SECOND
    return x ^ (x >> 16)


@triton.jit
def key_of(count, seed):
    """Return what the random numbers of a row depend on, beside the place in its state."""
    return hashed(count.to(tl.uint32) * HASH_STRIDE + hashed(seed.to(tl.uint32)))


@triton.jit
def stored(x, to: tl.constexpr, key, place, DRAWN: tl.constexpr):
    """Cast float32 numbers to the dtype in which a state is stored: `rounding.rounded_by`."""
    if DRAWN:
        missing: tl.constexpr = 13 if to == tl.float16 else 16
        noise = hashed(key ^ place.to(tl.uint32)) >> (32 - missing)
        found = (x.to(tl.uint32, bitcast=True) + noise) >> missing << missing
        found = found.to(tl.float32, bitcast=True)
        if to == tl.float16:
            scale: tl.constexpr = 1.0 / (1 << missing)
            small = tl.floor(x * 16777216.0 + noise.to(tl.float32) * scale) * (1.0 / 16777216.0)
            found = tl.where(tl.abs(x) < SMALLEST, small, found)
        x = tl.where(x == x, found, x)
    return x.to(to)


@triton.jit
def tile(x, stride, rows, rows_ok, columns, columns_ok):
    """Load a float32 tile of a matrix whose rows are `stride` apart. Elements out of bounds are zero."""
    here = x + rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(here, mask=rows_ok[:, None] & columns_ok[None, :], other=0.0).to(tl.float32)


@triton.jit
def chunk(c, b, mask, document, time, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr):
    """Compute the positions and masks of a chunk.

    Returns the positions `t`, which of them exist (`there`) and are unmasked (`real`), the count of unmasked tokens up
    to each (`clock`) and in the chunk (`length`), their documents, which queries read the state before the chunk
    (`fresh`), which keys enter the state after it (`keep`), and whether the state is carried through (`carried`)."""
    t = c * BT + tl.arange(0, BT)
    there = t < time
    real = there
    if HAS_MASK:
        real = tl.load(mask + b * time + t, mask=there, other=0) != 0
        clock = tl.cumsum(real.to(tl.float32), 0)
        length = tl.sum(real.to(tl.float32), 0)
    else:
        length = tl.minimum(time - c * BT, BT).to(tl.float32)
        clock = tl.minimum((tl.arange(0, BT) + 1).to(tl.float32), length)
    documents = tl.zeros([BT], tl.int32)
    fresh, keep = there, there
    carried = length >= 0
    if PACKED:
        row = document + b * time
        documents = tl.load(row + t, mask=there, other=-1)
        before = tl.load(row + tl.maximum(c * BT - 1, 0))
        before = tl.where(c > 0, before, 0)
        last = tl.load(row + tl.minimum(c * BT + BT, time) - 1)
        fresh, keep, carried = documents == before, documents == last, last == before
    return t, there, real, clock, length, documents, fresh, keep, carried


@triton.jit
def visible(documents, PACKED: tl.constexpr, BT: tl.constexpr):
    """Return the causal mask `[query, key]`, restricted to pairs of the same document."""
    i = tl.arange(0, BT)
    seen = i[:, None] >= i[None, :]
    if PACKED:
        seen = seen & (documents[:, None] == documents[None, :])
    return seen
