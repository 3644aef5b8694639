"""Norms in one kernel: the formulas of families, in one thread, and only inside the block."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from families import tiny
from t2r.generation.engine.norms import ROUNDING, available, fusable, fused_norms

pytestmark = pytest.mark.skipif(not available(), reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma", "olmo2", "qwen3", "t5"])
@torch.no_grad()
def test_the_norms_of_families(model_type, dtype):
    model = tiny(model_type, torch.float32).to(DEVICE, dtype).eval()
    norms = [module for module in model.modules() if fusable(module) is not None]
    assert len(norms) >= 2 * model.config.num_hidden_layers
    norm = norms[-1]
    norm.weight.copy_(torch.randn(norm.weight.shape))
    x = (3 * torch.randn(2, 3, norm.weight.numel(), device=DEVICE)).to(dtype)
    expected = norm(x)
    with fused_norms(norm) as names:
        assert names == [""]
        found = norm(x)
    assert not vars(norm).get("forward")
    assert found.dtype == dtype
    assert ((found - expected).abs() <= (2 * torch.finfo(dtype).eps + ROUNDING) * expected.abs()).all()
    if dtype == torch.bfloat16 and DEVICE == "cuda":  # the interpreter truncates where a GPU rounds
        assert (found != expected).float().mean() < 0.02  # the same formula, so that only sums differ


@torch.no_grad()
def test_other_threads_and_unknown_norms():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.threads = nn.Parameter(torch.rand(8, device=DEVICE)), 1e-6, []

        def forward(self, x):
            return x * self.weight  # no norm at all

    class PlainRMSNorm(OddRMSNorm):
        def forward(self, x):
            self.threads.append(threading.current_thread().name)
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    model, x = nn.ModuleDict({"odd": OddRMSNorm(), "plain": PlainRMSNorm()}), torch.rand(2, 8, device=DEVICE)
    with fused_norms(model) as names:
        assert names == ["plain"]
        model["plain"].threads.clear()
        other = threading.Thread(target=lambda: model["plain"](x), name="other")
        other.start()
        other.join()
        model["plain"](x)
    assert model["plain"].threads == ["other"]
