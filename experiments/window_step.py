"""The time of one step of the windows of a layer on a GPU, by how a program goes through a ring:

    python experiments/window_step.py [--rows 16] [--windows 2448 512 128] [--group 3] [--size 64]

For keys and values in 16 and in 8 bits, and several forms of `t2r.ops.triton.window_step`. Rings are full. The time is
that of a replay of a CUDA graph of a hundred steps, the median of interleaved rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

from t2r.attention.memories import Shape, WindowMemory
from t2r.ops.rings import How
from t2r.ops.triton import window_step
from t2r.ops.triton.window_step import Form

FORMS = [
    Form(lanes, block, warps, stages)
    for lanes in (False, True)
    for block, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
    for stages in (3, 5)
]
STEPS, ROUNDS = 100, 7


def replay(memory: WindowMemory, heads: int, group: int, rows: int, size: int) -> Callable[[], None]:
    """Capture steps of a layer in a CUDA graph."""
    q, k, v = (
        torch.randn(rows, n, 1, size, device="cuda", dtype=torch.bfloat16) for n in (heads * group, heads, heads)
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        memory.step_at_once(q, k, v, How(0.125))  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(STEPS):
            memory.step_at_once(q, k, v, How(0.125))

    def run(kept: tuple[object, ...] = (memory, q, k, v)) -> None:  # the graph reads their memory
        graph.replay()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--windows", type=int, nargs="*", default=[2448, 512, 128])
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    heads = len(given.windows)
    print(torch.cuda.get_device_name(), "windows", given.windows)
    for rows in given.rows:
        runs: dict[tuple[int, Form], Callable[[], None]] = {}
        for nbits in (16, 8):
            shape = Shape(tuple(given.windows), 4, nbits)
            token = torch.zeros(rows, 1, 1, given.size, device="cuda", dtype=torch.bfloat16)
            for form in FORMS:
                memory = WindowMemory(
                    shape, held=shape.empty(token, token), lengths=torch.full((rows,), 8192, device="cuda")
                )
                window_step.FORMS[nbits] = form
                try:
                    runs[nbits, form] = replay(memory, heads, given.group, rows, given.size)
                except Exception as error:  # a form that needs more shared memory than there is
                    print(rows, nbits, form, f"failed: {str(error).splitlines()[0]}")
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
