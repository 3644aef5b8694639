"""A kernel that was launched before with tensors of the same layout is launched without Triton's preparation."""

from __future__ import annotations

import pytest
import torch

from t2r import ops
from t2r.ops import registry

MISSING = registry.BACKENDS["triton"].missing()
pytest.importorskip("triton")
from t2r.ops.triton import decode  # noqa: E402
from t2r.ops.triton.launch import MOST, Repeated  # noqa: E402

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Kernel:
    """Stands for a Triton kernel on a machine without a GPU. It records how it was launched."""

    arg_names = ("x", "y", "first", "second", "SIZE", "KIND")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def prepared(*args, **constants):
            self.launches.append(("prepared", grid, args, constants))
            return Compiled(self)

        return prepared


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, blocks):
        return lambda *args: self.kernel.launches.append(("direct", blocks, args))


def test_only_a_known_layout_of_aligned_tensors_is_launched_directly():
    kernel = Kernel()
    repeated = Repeated(kernel)
    memory = torch.zeros(64)
    x, shifted = memory[:8], memory[1:9]

    def launch(tensor, kind):
        repeated.launch((tensor, None), kind, lambda: ((3,), (5, 7), {"KIND": 9, "SIZE": 8}))
        return kernel.launches[-1][0]

    assert launch(shifted, "a") == "prepared"
    assert launch(x, "a") == "prepared", "the kernel for tensors that are not aligned is another one"
    assert launch(x, "a") == "direct"
    assert kernel.launches[-1][1] == (3, 1, 1)
    assert kernel.launches[-1][2][:2] == (x, x), "the first tensor stands for one that is not given"
    assert kernel.launches[-1][2][2:] == (5, 7, 8, 9), "in the order of the kernel"
    assert launch(memory[:4], "a") == "prepared", "another shape"
    assert launch(memory[:16:2], "a") == "prepared", "other strides"
    assert launch(x.int(), "a") == "prepared", "another dtype"
    assert launch(x, "a") == "direct"
    assert launch(shifted, "a") == "prepared"
    assert launch(x, "b") == "prepared"
    for i in range(2 * MOST):
        launch(x, i)
    assert len(repeated.ready) <= MOST


def steps(device, dtype, time, *, shift=0, **options):
    """Return outputs and states of several steps of the triton backend and of the reference, in float64."""
    generator = torch.Generator().manual_seed(time)
    heads, groups, feature, value = 2, options.pop("groups", 1), options.pop("feature", 8), options.pop("value", 16)
    sizes = [heads * groups * feature, heads * feature, heads * value]
    shape = [(heads * groups, feature), (heads, feature), (heads, value)]
    memory = torch.rand(time, 3, sum(sizes) + shift, generator=generator).to(dtype)[:, :, shift:]
    decay = torch.rand(heads, feature, generator=generator) if options.get("decay") else None
    mask = torch.tensor([[True], [False], [True]]) if options.get("mask") else None
    own, exact = [], []
    state = ops.State(torch.zeros(3, heads, feature, value), torch.zeros(3, heads, feature), None)
    judge = state.map(torch.Tensor.double)
    state = state.map(lambda x: x.to(device))
    put = {"decay": None if decay is None else decay.to(device), "mask": None if mask is None else mask.to(device)}
    for token in memory:
        parts = [x.view(3, h, 1, size) for x, (h, size) in zip(token.to(device).split(sizes, -1), shape, strict=True)]
        out, _ = ops.step(*parts, state, **put, inplace=True, backend="triton")
        looked = ops.look(parts[0], state, torch.float32, backend="triton")
        own.append((out.cpu().double(), looked.cpu().double(), state.s.cpu().double()))
        q, k, v = (x.cpu().double() for x in parts)
        want, judge = ops.step(q, k, v, judge, decay=decay, mask=mask, backend="recurrent")
        exact.append((want, want, judge.s.clone()))
    return own, exact


LAYOUTS = [
    {},
    {"decay": True, "feature": 17},
    {"mask": True, "value": 24},
    {"groups": 3, "decay": True, "mask": True},
    {"shift": 3},
    {"shift": 8},
]


@no_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: " ".join(options) or "plain")
@torch.no_grad()
def test_repeated_steps_equal_the_reference(options, dtype):
    own, exact = steps("cuda", dtype, 4, **options)
    near = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for got, want in zip(own, exact, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **near)
    assert decode._decode.ready


@pytest.mark.skipif(MISSING is not None or torch.cuda.is_available(), reason="Triton's interpreter is not in use")
@torch.no_grad()
def test_the_interpreter_prepares_every_launch():
    own, exact = steps("cpu", torch.float32, 2)
    for got, want in zip(own, exact, strict=True):
        torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=2e-5)
    assert not decode._decode.ready
