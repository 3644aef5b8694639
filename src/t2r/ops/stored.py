"""How the keys and values of a window are stored: as they are, or in 8 bits.

In 8 bits, a key and a value are whole numbers from -127 to 127, times a scale in float16 for each of them. Tokens are
rounded when they are stored, and also where nothing is stored: whole sequences and single steps compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

AS_THEY_ARE, EIGHT = 16, 8
"""Numbers of bits. Keys and values that are stored as they are have the dtype of the model, mostly bfloat16."""
MOST = 127
"""The largest whole number in 8 bits."""
LEAST, LARGEST = 2.0**-24, 65504.0
"""The smallest and the largest scale in float16. A vector of zeros has the smallest."""


def token_bytes(dim: int, value_dim: int, nbits: int, itemsize: int = 2) -> int:
    """Return the bytes of a key and a value. If they are stored as they are, numbers of a model have `itemsize`: that
    of bfloat16 if nothing else is said."""
    return itemsize * (dim + value_dim) if nbits == AS_THEY_ARE else dim + value_dim + 4


def whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors `[..., dim]` as whole numbers, and their scales `[..., 1]`."""
    scale = (x.detach().float().abs().amax(-1, keepdim=True) / MOST).clamp(LEAST, LARGEST).half()
    # Not `round`, whose ties are other numbers than those of a kernel.
    return (x.float() / scale.float() + 0.5).floor().clamp(-MOST, MOST).to(torch.int8), scale


def rounded(x: Tensor, nbits: int) -> Tensor:
    """Return vectors as they will be read again. The gradient is that of vectors that are not rounded."""
    if nbits == AS_THEY_ARE:
        return x
    numbers, scale = whole_numbers(x)
    found = (numbers.float() * scale.float()).to(x.dtype)
    return x + (found - x).detach() if x.requires_grad else found


def stored(k: Tensor, v: Tensor, nbits: int) -> tuple[Tensor, ...]:
    """Return what is stored of keys and values: themselves, or whole numbers and both scales `[..., 2]`."""
    if nbits == AS_THEY_ARE:
        return k, v
    (keys, key_scale), (values, value_scale) = whole_numbers(k), whole_numbers(v)
    return keys, values, torch.cat([key_scale, value_scale], dim=-1)


def read(held: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return stored keys and values."""
    if len(held) == 2:
        return held[0].to(dtype), held[1].to(dtype)
    keys, values, scales = held
    key_scale, value_scale = scales.float().split(1, dim=-1)
    return (keys.float() * key_scale).to(dtype), (values.float() * value_scale).to(dtype)
