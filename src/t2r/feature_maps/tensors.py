"""Building blocks of feature maps: affine maps per head, and random matrices from a separate generator."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import transposed

# --- Tensors ----------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply weight `[maps, rows, dim]` and bias `[maps, rows]` to x `[batch, heads, time, dim]`, head by head.

    If there are more heads than maps, consecutive heads share a map (grouped queries). If there are more maps than
    heads, each head is mapped several times (un-grouped keys). Returns `[batch, max(heads, maps), time, rows]`.

    Uses einsum, because a broadcast matmul would copy the weights once per sequence of the batch.
    """
    (batch, heads, time, dim), (maps, rows, _) = x.shape, weight.shape
    groups = min(heads, maps)
    if time == 1 and not torch.is_grad_enabled():
        return TokenAffine.of(weight, bias, heads)(x)
    x = x.reshape(batch, groups, heads // groups, time, dim)
    y = torch.einsum("bnxtd,nwdr->bnxwtr", x, transposed(weight.reshape(groups, maps // groups, rows, dim)))
    if bias is not None:
        # Under autocast, y is half precision and the bias is not. The cast matches nn.Linear.
        y = y + bias.to(y.dtype).reshape(groups, 1, maps // groups, 1, rows)
    return y.flatten(1, 3)


class TokenAffine(NamedTuple):
    """The weights of `affine` for single tokens, arranged for one matrix product with few operations around it."""

    weight: Tensor
    """`[groups, dim, outputs]`"""
    bias: Tensor | None
    """`[groups, 1, outputs]`"""
    rows: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, heads: int) -> TokenAffine:
        """Arrange weight `[maps, rows, dim]` and bias `[maps, rows]` for inputs with this number of heads."""
        (maps, rows, dim), groups = weight.shape, min(heads, weight.shape[0])
        outputs = maps // groups * rows
        by = transposed(weight.reshape(groups, outputs, dim))
        return cls(by, None if bias is None else bias.reshape(groups, 1, outputs), rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x `[batch, heads, 1, dim]` to `[batch, max(heads, maps), 1, rows]`."""
        (batch, heads, _, dim), groups = x.shape, self.weight.shape[0]
        if batch == 1:  # heads are already the outermost dimension
            return self.product(x.reshape(groups, heads // groups, dim)).view(1, -1, 1, self.rows)
        x = x.reshape(batch, groups, heads // groups, dim).transpose(0, 1).reshape(groups, -1, dim)
        return self.product(x).view(groups, batch, -1, self.rows).transpose(0, 1).reshape(batch, -1, 1, self.rows)

    def product(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) if self.bias is None else torch.baddbmm(self.bias, x, self.weight)


def split_heads(x: Tensor, size: int) -> Tensor:
    """Split `[batch, time, heads * size]` into heads: `[batch, heads, time, size]`.

    One token is not transposed: decoding many small tensors takes as long as the number of its operations."""
    batch, time, _ = x.shape
    return x.view(batch, -1, 1, size) if time == 1 else x.view(batch, time, -1, size).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Join `[batch, heads, time, size]` to `[batch, time, heads * size]`."""
    return x.reshape(x.shape[0], 1, -1) if x.shape[2] == 1 else x.transpose(1, 2).flatten(2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of `[batch, heads, ...]` to get `heads` heads. Returns x unchanged if there are enough."""
    if x.shape[1] >= heads:
        return x
    times = heads // x.shape[1]
    return x.unsqueeze(2).expand(-1, -1, times, *x.shape[2:]).flatten(1, 2)


def full_precision(x: Tensor) -> Tensor:
    """Cast to float32, or keep float64. Sines and exponentials are too inaccurate in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def safe_norm(x: Tensor) -> Tensor:
    """Return the norm along the last dimension, at least 1e-4, so that dividing by it has a finite gradient.

    The bound limits that gradient to 1e4, which float16 can represent.
    """
    return x.square().sum(-1, keepdim=True).clamp_min(1e-8).sqrt()


# --- Random matrices --------------------------------------------------------------------------------------
# Always drawn on the CPU in float32, so that a seed gives the same values on every device and dtype.


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def like_linear(*shape: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw from the initialization of nn.Linear with `dim` inputs: U(-1/sqrt(dim), 1/sqrt(dim))."""
    draw = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
    return (2 * draw - 1) / math.sqrt(dim)


def orthogonal_rows(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw unit rows `[heads, rows, dim]`, uniform on the sphere and orthogonal within blocks of `dim` rows."""
    blocks = gaussian(heads, -(-rows // dim), dim, dim, generator=generator)
    q, r = torch.linalg.qr(blocks)
    # QR fixes the signs by convention. q is uniform only after multiplying by the signs of the diagonal.
    uniform: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return uniform.mT.flatten(1, 2)[:, :rows]


def identity_like(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return a matrix with `rows` rows that preserves inner products as well as possible, like an identity."""
    if rows < dim:
        return orthogonal_rows(heads, rows, dim, generator) * math.sqrt(dim / rows)
    identity = torch.eye(dim, device="cpu", dtype=torch.float32).expand(heads, dim, dim)
    return torch.cat([identity, orthogonal_rows(heads, rows - dim, dim, generator)], dim=1)
