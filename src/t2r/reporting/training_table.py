"""Generates the tables of training memory in docs/training.md and docs/cluster.md: weights are counted, activations
follow a formula.

Run `python -m t2r.reporting.training_table docs/training.md docs/cluster.md` to update the pages.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from t2r.training.planning.weights import FLOAT, weight_bytes

TABLE = re.compile(r"(<!-- (memory|cluster) -->\n).*?(<!-- end -->)", re.DOTALL)
FEATURES = 32
"""The feature size of the default recipe."""


@dataclass(frozen=True)
class Size:
    """The dimensions of a language model that determine its memory."""

    name: str
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    tied: bool = False
    """Whether embeddings and head are one matrix."""

    @property
    def tables(self) -> int:
        """Parameters of embeddings and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def maps(self) -> int:
        """Parameters of the feature maps of the default recipe: for each head an affine map of queries and one of keys,
        key weights, and decay rates."""
        head = self.hidden // self.heads
        return self.layers * self.heads * (2 * FEATURES * (head + 1) + head + FEATURES)


SIZES = (
    Size("gpt2 (124M)", 124_439_808, 12, 768, 3072, 12, 50_257),
    Size("SmolLM2-135M", 134_515_008, 30, 576, 1536, 9, 49_152),
    Size("SmolLM2-360M", 361_821_120, 32, 960, 2560, 15, 49_152),
    Size("TinyLlama-1.1B", 1_100_048_384, 22, 2048, 5632, 32, 32_000),
    Size("Qwen2.5-1.5B", 1_543_714_304, 28, 1536, 8960, 12, 151_936),
    Size("Mistral-7B", 7_241_732_096, 32, 4096, 14_336, 32, 32_000),
)

CLUSTER = (
    (Size("SmolLM2-135M", 134_515_008, 30, 576, 1536, 9, 49_152, tied=True), 1),
    (Size("Qwen2.5-1.5B", 1_543_714_304, 28, 1536, 8960, 12, 151_936, tied=True), 1),
    (Size("Mistral-7B", 7_241_732_096, 32, 4096, 14_336, 32, 32_000), 8),
    (Size("Llama-3.1-70B", 70_553_706_496, 80, 8192, 28_672, 64, 128_256), 32),
)
"""Models and numbers of processes of docs/cluster.md."""
CLUSTER_TOKENS = 4096


def trained_parameters(size: Size, method: str, rank: int = 16) -> int:
    """Return the number of trained parameters. LoRA adapts four projections of attention and three of the MLP."""
    if method == "maps":
        return size.maps
    if method == "lora":
        widths = 4 * 2 * size.hidden + 3 * (size.hidden + size.intermediate)
        return size.maps + size.layers * rank * widths
    return size.parameters + size.maps


def activation_bytes(size: Size, method: str, tokens: int, *, checkpointing: bool = False, bytes_: int = FLOAT) -> int:
    """Return the bytes of activations kept for the backward pass over `tokens` tokens.

    Values per token and layer: a transfer keeps 4 times the hidden size; training all parameters or LoRA keeps 10 times
    the hidden size and 4 times the MLP size; both keep 4 times the features of all heads. With gradient checkpointing,
    only the input of each layer and the activations of one layer are kept; a transfer does not benefit from it."""
    features = 4 * FEATURES * size.heads
    if method == "maps":
        return tokens * size.layers * (4 * size.hidden + features) * bytes_
    layer = 10 * size.hidden + 4 * size.intermediate + features
    kept = size.layers * size.hidden + layer if checkpointing else size.layers * layer
    head = size.vocabulary * size.hidden if method == "all" else 0  # the gradient of the head, computed in slices
    return (tokens * (kept + 3 * size.hidden) + head) * bytes_


def training_bytes(size: Size, method: str, tokens: int, *, checkpointing: bool = False, bf16: bool = True) -> int:
    """Return the total: the student and its optimizer in float32, the teacher, and activations."""
    trained = trained_parameters(size, method)
    adapters = trained - size.maps if method == "lora" else 0
    bytes_ = 2 if bf16 else FLOAT
    held = weight_bytes(
        size.parameters + size.maps + adapters,
        trained,
        teacher=size.parameters,  # loaded for all stages
        teacher_bytes=bytes_,
    )
    return held + activation_bytes(size, method, tokens, checkpointing=checkpointing, bytes_=bytes_)


def sharded_bytes(size: Size, tokens: int, processes: int) -> int:
    """Return the bytes of one of several processes that divide a model (FSDP 2), for training all parameters with
    gradient checkpointing and a teacher in bfloat16, with `tokens` tokens per forward pass.

    Each process has its part of weights, gradients, optimizer and teacher, and all feature maps. Beside them it holds
    what is gathered: embeddings and head with their gradients, and two layers, the one that runs and the next, with the
    gradients of one, each of the student in float32 and of the teacher in bfloat16."""
    teacher = 2
    maps = weight_bytes(size.maps, size.maps)
    held = weight_bytes(size.parameters, size.parameters, teacher=size.parameters, teacher_bytes=teacher)
    if processes == 1:
        gathered = 0
    else:
        layer = (size.parameters - size.tables) // size.layers
        gathered = size.tables * (2 * FLOAT + teacher) + layer * (2 * FLOAT + FLOAT + 2 * teacher)
    return held // processes + maps + gathered + activation_bytes(size, "all", tokens, checkpointing=True, bytes_=2)


def cluster_table() -> str:
    """Return a Markdown table of the memory, in GB, of each process, and of the CPU of the main one."""
    lines = [
        "| model | processes | each process, all parameters | main process, CPU | swapped model on disk |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size, processes in CLUSTER:
        whole = FLOAT * (size.parameters + size.maps)
        cells = [sharded_bytes(size, CLUSTER_TOKENS, processes), whole, whole if processes > 1 else 0]
        told = " | ".join(f"{cell / 1e9:.1f}" if cell else "" for cell in cells)
        lines.append(f"| {size.name} | {processes} | {told} |")
    return "".join(f"{line}\n" for line in lines)


def table(tokens: int = 16384) -> str:
    """Return a Markdown table of the memory, in GB, of a batch of this many tokens."""
    lines = [
        "| model | maps | LoRA | LoRA, checkpointing | all | all, checkpointing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for size in SIZES:
        cells = [training_bytes(size, "maps", tokens)]
        cells += [training_bytes(size, m, tokens, checkpointing=c) for m in ("lora", "all") for c in (False, True)]
        lines.append(f"| {size.name} | {' | '.join(f'{cell / 1e9:.1f}' for cell in cells)} |")
    return "".join(f"{line}\n" for line in lines)


def page(text: str) -> str:
    """Return the page with its table updated."""
    tables = {"memory": table, "cluster": cluster_table}
    return TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
