"""The time of one step of the windows of a layer on a GPU, by how a program goes through a ring:

    python experiments/window_step.py [--rows 16] [--windows 2448 512 128] [--group 3] [--size 64]

For keys and values in 16 and in 8 bits, and several forms of `t2r.ops.triton.window_step`: with whole rings (chunk 0)
and with rings that are divided, also where there are so many rows that a step would not divide them. Rings are full.
The time is that of a replay of a CUDA graph of a hundred steps, the median of interleaved rounds. The averages of each
form are compared with those of the first one: the largest difference must be that of rounding. A step of divided rings
is repeated, too, and must return the same bits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.attention.memories import Shape, WindowMemory
from t2r.ops.rings import How
from t2r.ops.stored import stored
from t2r.ops.triton import window_step
from t2r.ops.triton.window_step import Form

FORMS = {
    16: [
        *(Form(False, 256, 8, 3, chunk) for chunk in (0, 256, 512)),
        *(Form(False, 128, 4, 3, chunk) for chunk in (0, 128, 256, 512)),
        *(Form(False, 64, 4, 3, chunk) for chunk in (0, 128, 256, 512)),
    ],
    8: [
        *(Form(True, 256, 8, 3, chunk) for chunk in (0, 256, 512)),
        *(Form(True, 128, 8, 3, chunk) for chunk in (0, 256, 512)),
        *(Form(False, block, 4, 3, 256) for block in (64, 128)),
    ],
}
"""The best ones with whole rings on an H200, and the same with divided ones. In 8 bits also products, which were slow:
they need fewer registers, so that several programs run on a multiprocessor."""
STEPS, ROUNDS, REPEATS = 100, 7, 20


class Layer(NamedTuple):
    """The windows of a layer, and a token."""

    memory: WindowMemory
    full: list[Tensor]
    """What the rings have before the token."""
    token: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, windows: list[int], nbits: int, rows: int, group: int, size: int, device: str) -> Layer:
        shape, generator = Shape(tuple(windows), 4, nbits), torch.Generator(device).manual_seed(0)

        def numbers(heads: int, time: int) -> Tensor:
            return torch.randn(rows, heads, time, size, generator=generator, device=device, dtype=torch.bfloat16)

        full = [x[:, 0] for x in stored(numbers(1, shape.slots), numbers(1, shape.slots), nbits)]
        token = (numbers(len(windows) * group, 1), numbers(len(windows), 1), numbers(len(windows), 1))
        memory = WindowMemory(shape, held=[x.clone() for x in full], lengths=torch.full((rows,), 8192, device=device))
        memory.skipped = None  # as in the engine: there is no padding, and no operation that subtracts it
        return cls(memory, full, token)

    @torch.no_grad()
    def step(self) -> Tensor:
        return self.memory.step_at_once(*self.token, How(0.125))[0].numerator

    def again(self) -> Tensor:
        """Return the averages of a step from full rings."""
        for x, own in zip(self.full, self.memory.held, strict=True):
            own.copy_(x)
        return self.step().clone()


def replay(layer: Layer) -> Callable[[], None]:
    """Capture steps of a layer in a CUDA graph. The kernel was compiled before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            layer.step()

    def run(kept: Layer = layer) -> None:  # the graph reads its memory
        graph.replay()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 128])
    parser.add_argument("--windows", type=int, nargs="*", default=[2448, 512, 128])
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    window_step.PROGRAMS = 2**30  # divide rings also where there are many
    print(torch.cuda.get_device_name(), "windows", given.windows)
    for rows in given.rows:
        runs: dict[tuple[int, Form], Callable[[], None]] = {}
        for nbits, forms in FORMS.items():
            expected: Tensor | None = None
            for form in forms:
                layer = Layer.of(given.windows, nbits, rows, given.group, given.size, "cuda")
                window_step.FORMS[nbits] = form
                try:
                    found = layer.again()
                    runs[nbits, form] = replay(layer)
                except Exception as error:  # a form that needs more shared memory than there is
                    print(rows, nbits, form, f"failed: {str(error).splitlines()[0]}")
                    continue
                expected = found if expected is None else expected
                different = sum(not torch.equal(layer.again(), found) for _ in range(REPEATS if form.chunk else 0))
                off = (found.float() - expected.float()).abs().max().item()
                print(f"{rows} rows, {nbits} bits, {form}: difference {off:.1e}, {different} repetitions not the same")
        times: dict[tuple[int, Form], list[float]] = {key: [] for key in runs}
        for _ in range(ROUNDS):
            for key, run in runs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                times[key].append(1000 * start.elapsed_time(end) / STEPS)
        for (nbits, form), each in sorted(times.items(), key=lambda item: median(item[1])):
            print(f"rows {rows}, {nbits} bits: {median(each):.1f} us, {form}", flush=True)


if __name__ == "__main__":
    main()
