"""The time of one step of a layer's attention on a GPU: windows, and states of what has left them, in one kernel:

    python experiments/window_step.py [--rows 1 16] [--windows 2304 512 128] [--features 32] [--group 3] [--size 64]

For keys and values in 16 and in 8 bits, and several forms of `t2r.ops.triton.window_step`; beside them, the step of an
RNN (a state of 128 features for each query head, with decay). Rings are full, and queries and keys are rotated by the
kernel. The time is that of a replay of a CUDA graph of a hundred steps, the median of interleaved rounds. The averages
of each form are compared with those of the first one: the largest difference must be that of rounding. Each step is
also repeated from the same buffers, and must return the same bits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from t2r import ops
from t2r.attention.memories import Shape, WindowMemory
from t2r.feature_maps import make_feature_map
from t2r.ops import Far, State
from t2r.ops.rings import How
from t2r.ops.stored import stored
from t2r.ops.triton import window_step
from t2r.ops.triton.window_step import Form

FORMS = [Form(block, warps) for block in (64, 128, 256) for warps in (1, 2, 4)]
STEPS, ROUNDS, REPEATS = 100, 7, 10
OF_STATES: dict[str, Any] = {"activation": "softmax", "init": "identity", "decay": True, "key_weights": True}


class Layer:
    """The windows and states of a layer, and a token."""

    def __init__(self, given: argparse.Namespace, nbits: int, rows: int) -> None:
        heads, self.rows = len(given.windows), rows
        self.generator = torch.Generator("cuda").manual_seed(0)
        shape = Shape(tuple(given.windows), 4, nbits)
        keys, values = (self.random(rows, 1, shape.slots, given.size) for _ in range(2))
        self.full = [x[:, 0] for x in stored(keys, values, nbits)]
        self.q, self.k, self.v = (self.random(rows, n, 1, given.size) for n in (heads * given.group, heads, heads))
        angles = self.random(rows, 1, given.size // 2).repeat(1, 1, 2)
        self.rotation = angles.cos(), angles.sin()
        self.memory = WindowMemory(
            shape, held=[x.clone() for x in self.full], lengths=torch.full((rows,), 8192, device="cuda")
        )
        self.memory.skipped = None  # as in the engine: there is no padding, and no operation that subtracts it
        self.far: Far | None = None
        if given.features:
            options = OF_STATES | {"query_weights": True, "shared": False, "grouped": True}
            made = make_feature_map(
                "t2r",
                head_dim=given.size,
                feature_size=given.features,
                num_heads=heads * given.group,
                num_key_value_heads=heads,
                **options,
            ).to("cuda", torch.bfloat16)
            features = made.step_features(0.125)
            assert features is not None
            s = torch.rand(rows, heads, given.features, given.size, device="cuda")
            self.far = Far(State(s, s.mean(-1)), features, made.decay)

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self) -> Tensor:
        how = How(0.125)
        sums, _ = self.memory.step_at_once(self.q, self.k, self.v, how, far=self.far, rotation=self.rotation)
        return sums.numerator

    def again(self) -> Tensor:
        """Return the averages of a step from full rings and a known state."""
        for x, own in zip(self.full, self.memory.held, strict=True):
            own.copy_(x)
        if self.far is not None:
            self.far.state.s.fill_(0.5)
            self.far.state.z.fill_(0.5)
        return self.step().clone()


class Rnn:
    """The step of a layer of an RNN."""

    def __init__(self, given: argparse.Namespace, rows: int) -> None:
        heads, keys, features = len(given.windows) * given.group, len(given.windows), 128
        made = make_feature_map(
            "t2r", head_dim=given.size, feature_size=features, num_heads=heads, num_key_value_heads=keys, shared=False,
            **OF_STATES,
        ).to("cuda", torch.bfloat16)  # fmt: skip
        self.rule, self.features = made.rule(), made.step_features(0.125)
        s = torch.rand(rows, heads, features, given.size, device="cuda")
        self.state = State(s, s.mean(-1))
        self.q, self.k, self.v = (
            torch.randn(rows, n, 1, given.size, device="cuda", dtype=torch.bfloat16) for n in (heads, keys, keys)
        )

    @torch.no_grad()
    def step(self) -> Any:
        how: dict[str, Any] = {"decay": self.rule.decay, "inplace": True, "features": self.features}  # type: ignore[attr-defined]
        return ops.step(self.q, self.k, self.v, self.state, **how)[0]


def replay(layer: Layer | Rnn) -> Callable[[], None]:
    """Capture steps of a layer in a CUDA graph. The kernel was compiled before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            layer.step()

    def run(kept: Layer | Rnn = layer) -> None:  # the graph reads its memory
        graph.replay()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--windows", type=int, nargs="*", default=[2304, 512, 128])
    parser.add_argument("--features", type=int, default=32, help="of the state of each key head; 0: windows alone")
    parser.add_argument("--form", type=int, nargs=2, action="append", metavar=("BLOCK", "WARPS"))
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    forms = [Form(*form) for form in given.form] if given.form else FORMS
    print(torch.cuda.get_device_name(), "windows", given.windows, "features", given.features)
    for rows in given.rows:
        rnn = Rnn(given, rows)
        rnn.step()
        runs: dict[str, Callable[[], None]] = {"the step of an RNN": replay(rnn)}
        for nbits in (16, 8):
            expected: Tensor | None = None
            for form in forms:
                layer, name = Layer(given, nbits, rows), f"{nbits} bits, {form}"
                window_step.FORMS[nbits] = form
                try:
                    found = layer.again()
                    runs[name] = replay(layer)
                except Exception as error:  # a form that needs more shared memory than there is
                    print(rows, name, f"failed: {str(error).splitlines()[0]}")
                    continue
                expected = found if expected is None else expected
                different = sum(not torch.equal(layer.again(), found) for _ in range(REPEATS))
                off = (found.float() - expected.float()).abs().max().item()
                print(f"{rows} rows, {name}: difference {off:.1e}, {different} repetitions not the same", flush=True)
        times: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(ROUNDS):
            for key, run in runs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                times[key].append(1000 * start.elapsed_time(end) / STEPS)
        for name, each in sorted(times.items(), key=lambda item: median(item[1])):
            print(f"rows {rows}: {median(each):.1f} us, {name}", flush=True)


if __name__ == "__main__":
    main()
