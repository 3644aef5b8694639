"""A step of softmax attention over a static cache, compared with PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from t2r.ops import registry

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CASES = {  # rows, heads, key heads, size of the buffers, size of a head; rotated; dtype
    "grouped": ((3, 6, 2, 130, 40), True, torch.float32),
    "half precision": ((2, 3, 1, 80, 64), True, torch.bfloat16),
    "many heads": ((2, 10, 1, 20, 8), True, torch.float32),
    "more heads than a program has": ((1, 70, 1, 20, 8), False, torch.float32),
    "own keys": ((2, 2, 2, 33, 16), False, torch.float32),
}


@pytest.mark.parametrize(("sizes", "rotated", "dtype"), CASES.values(), ids=CASES)
def test_softmax_step(sizes, rotated, dtype):
    from t2r.ops.triton.softmax_step import softmax_step

    rows, heads, key_heads, size, dim = sizes
    q, k, v = (torch.randn(rows, n, 1, dim, device=DEVICE).to(dtype) for n in (heads, key_heads, key_heads))
    keys, values = torch.randn(2, rows, key_heads, size, dim, device=DEVICE).to(dtype)
    lengths = torch.tensor([size - 1, 0, size // 2], device=DEVICE)[:rows]
    cos, sin = torch.randn(2, rows, 1, dim, device=DEVICE).to(dtype) if rotated else (None, None)

    def rotate(x):
        if not rotated:
            return x
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    before = keys.clone()
    expected_keys, expected_values = keys.clone(), values.clone()
    at = torch.arange(rows, device=DEVICE), slice(None), lengths
    expected_keys[at], expected_values[at] = rotate(k)[:, :, 0], v[:, :, 0]
    seen = torch.arange(size, device=DEVICE) <= lengths[:, None]
    full = (x.double() for x in (rotate(q), expected_keys, expected_values))
    expected = scaled_dot_product_attention(*full, attn_mask=seen[:, None, None], scale=0.3, enable_gqa=True)
    found = softmax_step(q, k, v, keys, values, lengths, 0.3, (cos, sin) if rotated else None)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(found.double(), expected, **near)
    torch.testing.assert_close(keys, expected_keys, **near)
    assert torch.equal(values, expected_values)
    others = (torch.arange(size, device=DEVICE) != lengths[:, None])[:, None, :, None].expand_as(keys)
    assert torch.equal(keys[others], before[others])
