"""What the maps are made of: affine maps per head, and random matrices drawn without disturbing anybody."""

import math

import torch
from torch import Tensor

# --- Tensors ----------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map x `[batch, heads, time, dim]` by weight `[maps, rows, dim]` and bias `[maps, rows]`, head by head.

    More heads than maps: consecutive heads share a map (grouped queries). More maps than heads: each head
    goes through several (un-grouped keys). Returns `[batch, max(heads, maps), time, rows]`.

    It is an einsum because a broadcast matmul would copy the weights once per sequence of the batch.
    """
    (batch, heads, time, dim), (maps, rows, _) = x.shape, weight.shape
    groups = min(heads, maps)
    if time == 1 and not torch.is_grad_enabled():
        return affine_of_one(x, weight, bias, groups)
    x = x.reshape(batch, groups, heads // groups, time, dim)
    y = torch.einsum("bnxtd,nwrd->bnxwtr", x, weight.reshape(groups, maps // groups, rows, dim))
    if bias is not None:
        # The cast is for autocast, where y is half precision and the bias is not: do as nn.Linear does.
        y = y + bias.to(y.dtype).reshape(groups, 1, maps // groups, 1, rows)
    return y.flatten(1, 3)


def affine_of_one(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """The same for one token: a single product, in as few operations as it takes."""
    (batch, heads, _, dim), (maps, rows, _) = x.shape, weight.shape
    share, several = heads // groups, maps // groups
    x = x.reshape(batch, groups, share, dim).transpose(0, 1).reshape(groups, batch * share, dim)
    by = weight.reshape(groups, several * rows, dim).mT
    y = torch.bmm(x, by) if bias is None else torch.baddbmm(bias.reshape(groups, 1, several * rows), x, by)
    return y.view(groups, batch, share * several, rows).transpose(0, 1).reshape(batch, -1, 1, rows)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of `[batch, heads, ...]` until there are `heads`; x itself if there are enough."""
    if x.shape[1] >= heads:
        return x
    times = heads // x.shape[1]
    return x[:, :, None].expand(-1, -1, times, *x.shape[2:]).flatten(1, 2)


def full_precision(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is: sines and exponentials of half precision numbers are noise."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def safe_norm(x: Tensor) -> Tensor:
    """Length along the last dimension, at least 1e-4: dividing by it is finite, as is its gradient.

    The floor also bounds that gradient by 1e4, which float16 can still represent.
    """
    return x.square().sum(-1, keepdim=True).clamp_min(1e-8).sqrt()


# --- Draws ------------------------------------------------------------------------------------------------
# Always on the CPU and in float32, whatever the default device and dtype: a seed means the same everywhere.


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def like_linear(*shape: int, dim: int, generator: torch.Generator) -> Tensor:
    """What nn.Linear with `dim` inputs draws, weight and bias alike: U(-1/sqrt(dim), 1/sqrt(dim))."""
    draw = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
    return (2 * draw - 1) / math.sqrt(dim)


def orthogonal_rows(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit rows `[heads, rows, dim]`, each run of `dim` of them orthogonal, each uniform on the sphere."""
    blocks = gaussian(heads, -(-rows // dim), dim, dim, generator=generator)
    q, r = torch.linalg.qr(blocks)
    # QR fixes the signs by its own convention; only with those of the diagonal undone is q uniform.
    uniform: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return uniform.mT.flatten(1, 2)[:, :rows]


def identity_like(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """The nearest thing to an identity with that many rows: inner products survive it as well as they can."""
    if rows < dim:
        return orthogonal_rows(heads, rows, dim, generator) * math.sqrt(dim / rows)
    identity = torch.eye(dim, device="cpu", dtype=torch.float32).expand(heads, dim, dim)
    return torch.cat([identity, orthogonal_rows(heads, rows - dim, dim, generator)], dim=1)
