"""Attention with a feature map for softmax is an RNN: the same numbers, in constant memory and constant time.

Random weights, no downloads, under a minute on two cores.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from t2r import ops

HEADS, FEATURES, HEAD_DIM = 8, 32, 128
LENGTHS = (128, 1024, 8192, 32768)
STEPS = 50


def features(length: int) -> Tensor:
    return torch.rand(1, HEADS, length, FEATURES)


def heads(length: int) -> Tensor:
    return torch.randn(1, HEADS, length, HEAD_DIM)


def agreement() -> Table:
    """Three ways to compute one thing, each compared with the quadratic form in float64."""
    q, k, v = features(512), features(512), heads(512)
    exact, _ = ops.linear_attention(q.double(), k.double(), v.double(), backend="quadratic")
    state, tokens = ops.State.zeros(k, v), []
    for t in range(q.shape[2]):
        now = slice(t, t + 1)
        out, state = ops.step(q[:, :, now], k[:, :, now], v[:, :, now], state, inplace=True)
        tokens.append(out)
    forms = {
        "parallel, as attention": ops.linear_attention(q, k, v, backend="quadratic")[0],
        "chunked, as in training": ops.linear_attention(q, k, v, backend="chunked")[0],
        "token by token, as an RNN": torch.cat(tokens, dim=2),
    }
    table = Table("form", "largest difference", title="One function: float32 against exact, 512 tokens")
    for name, out in forms.items():
        table.add_row(name, f"{(out - exact).abs().max().item():.1e}")
    return table


def decoding() -> Table:
    """What one more token costs after ever longer texts."""
    table = Table(title=f"One more token, {HEADS} heads of {HEAD_DIM}, feature size {FEATURES}")
    for heading in ("after", "KV cache", "RNN state", "softmax", "RNN"):
        table.add_column(heading, justify="right")
    for length in LENGTHS:
        keys, values, query = heads(length), heads(length), heads(1)
        _, state = ops.linear_attention(features(length), features(length), values)
        q, k, v = features(1), features(1), heads(1)

        # Bound as defaults, because the loop goes on. The cache is preallocated: softmax at its best.
        def softmax_step(query: Tensor = query, keys: Tensor = keys, values: Tensor = values) -> None:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)

        def rnn_step(q: Tensor = q, k: Tensor = k, v: Tensor = v, state: ops.State = state) -> None:
            ops.step(q, k, v, state, inplace=True)

        table.add_row(
            f"{length} tokens",
            f"{(keys.nbytes + values.nbytes) / 2**10:,.0f} KiB",
            f"{(state.s.nbytes + state.z.nbytes) / 2**10:,.0f} KiB",
            f"{microseconds(softmax_step):,.0f} µs",
            f"{microseconds(rnn_step):,.0f} µs",
        )
    return table


def microseconds(step: Callable[[], None]) -> float:
    def once() -> float:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6

    once()
    return median(once() for _ in range(STEPS))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    console = Console()
    console.print(agreement())
    console.print(decoding())


if __name__ == "__main__":
    main()
