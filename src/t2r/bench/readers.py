"""The ways to decode a model, each with its cache: its own forward, the engine, and a captured step.

The context is random tokens, which are read by the model: the time of a step does not depend on their values.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from t2r.attention.cache import cache_bytes
from t2r.bench.models import feature_sizes
from t2r.errors import T2RError
from t2r.generation.engine.request import no_static_cache
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.engine.step import DecodeStep
from t2r.graphs import CudaGraph
from t2r.hub import synchronize
from t2r.model.logits import last_only
from t2r.model.modeling import T2RModel
from t2r.model.windows import with_windows
from t2r.ops.constants import constant_weights

READ = 512
"""Tokens of the context that are read at a time, so that reading needs little memory."""


class Reader:
    """A model and its cache of the context so far. A step is the model's own forward."""

    state_dtype: torch.dtype | None = None
    """The dtype in which states are stored, if not that of their feature maps."""

    def __init__(self, name: str, model: Any, batch: int, seed: int) -> None:
        self.name, self.model, self.batch, self.seed = name, model, batch, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.cache: Any = None
        self.constants: dict[Any, Any] = {}
        """Values that depend only on the weights. `generate` computes them once per call."""
        self.length = 0

    def tokens(self, count: int) -> Tensor:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (self.batch, count), generator=self.generator)
        return ids.to(self.model.device)

    def read_until(self, length: int) -> None:
        """Read random tokens up to this length."""
        options = last_only(self.model)
        while self.length < length:
            count = min(READ, length - self.length)
            read = self.model(input_ids=self.tokens(count), past_key_values=self.cache, use_cache=True, **options)
            self.cache = getattr(read, "past_key_values", None)
            if self.cache is None:
                raise T2RError(f"{self.name} has no cache, so its decoding cannot be measured")
            self.length += count

    def held_bytes(self) -> int:
        return cache_bytes(self.cache)

    def launches(self) -> int | None:
        """Return the number of kernels or operations of a captured step. None: it is not known."""
        return None

    def free(self) -> None:
        """Free the memory of the cache. The reader cannot be used after this."""
        self.cache = None
        self.constants.clear()
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def milliseconds(self, steps: int) -> float:
        """Return the mean time of a step over `steps` steps, which use a copy of the cache."""
        cache, tokens = copy.deepcopy(self.cache), self.tokens(1 + steps)

        def step(i: int) -> None:
            self.model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)

        with constant_weights(self.constants):
            return self.timed(step, steps)

    def timed(self, step: Callable[[int], None], steps: int) -> float:
        step(0)  # warm-up: the copy of the cache is loaded
        synchronize(self.model.device)
        started = time.perf_counter()
        for i in range(1, 1 + steps):
            step(i)
        synchronize(self.model.device)
        return (time.perf_counter() - started) * 1e3 / steps


class EngineReader(Reader):
    """A model decoded with the captured step of `t2r.Engine`. The layers of a softmax model are softmax layers there.

    Unless it `reads`, its cache stays empty and only the number of tokens in it is set.
    Raises T2RError if the engine does not support the model."""

    def __init__(
        self, other: Reader, compiled: bool = False, reads: bool = True, state_dtype: torch.dtype | None = None
    ) -> None:
        model = on_the_engine(other.model)
        super().__init__(f"{other.name}, engine", model, other.batch, other.seed)
        if (reason := no_static_cache(model)) is not None:
            raise T2RError(reason)
        self.compiled, self.reads, self.state_dtype = compiled, reads, state_dtype
        self.decode: DecodeStep | None = None

    def read_until(self, length: int) -> None:
        if self.reads:
            super().read_until(length)
        else:
            self.length = length

    def held_bytes(self) -> int:
        return super().held_bytes() if self.decode is None else self.batch * self.decode.row_bytes(self.length)

    def launches(self) -> int | None:
        return None if self.decode is None else self.decode.launches()

    def free(self) -> None:
        self.decode = None
        super().free()

    def milliseconds(self, steps: int) -> float:
        size = self.length + 1 + steps if self.model.grows() else None
        if self.decode is None or self.decode.max_length != size:
            self.decode = None  # frees its memory before the next is allocated
            how: dict[str, Any] = {"compiled": self.compiled, "state_dtype": self.state_dtype}
            self.decode = DecodeStep(self.model, self.batch, size, **how)
        decode = self.decode
        if self.reads:
            rows = torch.arange(self.batch, device=decode.tokens.device)
            decode.put_rows(rows, self.cache, rows, torch.zeros_like(rows))
        decode.own.lengths.fill_(self.length)
        decode.active.fill_(1)
        decode.greedy.fill_(True)
        return self.timed(lambda i: decode.run(), steps)


class CapturedReader(Reader):
    """A softmax model, decoded with a captured step on transformers' static cache, as long as the context."""

    def __init__(self, other: Reader, compiled: bool = False) -> None:
        super().__init__(f"{other.name}, captured", other.model, other.batch, other.seed)
        self.compiled = compiled
        self.graph: Any = None
        self.size = 0

    def milliseconds(self, steps: int) -> float:
        size = self.length + 1 + steps
        if self.graph is None or self.size != size:
            self.size, self.graph = size, None
            self.allocate(size)
            self.capture()
        self.fill()
        self.go_to(self.length)
        return self.timed(lambda i: self.graph(), steps)

    def allocate(self, size: int) -> None:
        self.static: Any = StaticCache(config=self.model.config, max_cache_len=size)
        self.token = self.tokens(1)
        self.model(input_ids=self.token, past_key_values=self.static, use_cache=True)  # allocates the cache
        self.position = torch.zeros_like(self.token)
        self.column = torch.arange(size, device=self.model.device)  # the graph reads it: it must stay allocated
        self.go_to(0)

    def forward(self) -> Tensor:
        """Read a token, and choose the next."""
        out = self.model(
            input_ids=self.token,
            position_ids=self.position,
            attention_mask=(self.column <= self.position[:, :1])[:, None, None, :],
            past_key_values=self.static,
            use_cache=True,
        )
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.position.add_(1)
        logits: Tensor = out.logits
        return logits

    def capture(self) -> None:
        run = torch.compile(self.forward, dynamic=False) if self.compiled else self.forward
        self.graph = CudaGraph(run, self.model.device, warm_up=1)

    def free(self) -> None:
        self.graph = self.static = None
        super().free()

    def go_to(self, position: int) -> None:
        """Set the position of the next token. The static cache counts too, and would write after its end."""
        self.position.fill_(position)
        for layer in self.static.layers:
            if isinstance(count := getattr(layer, "cumulative_length", None), Tensor):
                count.fill_(position)

    def fill(self) -> None:
        """Copy the cache into the static buffers."""
        for own, read in zip(self.static.layers, self.cache.layers, strict=True):
            own.keys[:, :, : self.length].copy_(read.keys)
            own.values[:, :, : self.length].copy_(read.values)
            own.cumulative_length.fill_(self.length)
        if hasattr(self, "position"):
            self.position.fill_(self.length)


def captured(
    readers: Sequence[Reader],
    compiled: bool,
    without: dict[str, str],
    reads: bool,
    state_dtype: torch.dtype | None = None,
) -> list[Reader]:
    """Return the readers in the engine and, for softmax models on a GPU that read the context, with captured steps.

    `without` receives the models that the engine does not support."""
    found: list[Reader] = []
    for reader in readers:
        try:
            found.append(EngineReader(reader, compiled, reads, state_dtype))
        except T2RError as reason:
            without[reader.name] = str(reason)
        if reads and not isinstance(reader.model, T2RModel) and reader.model.device.type == "cuda":
            found.append(CapturedReader(reader, compiled))
    return found


def windowed(readers: Sequence[Reader], state_dtype: torch.dtype | None = None) -> Reader | None:
    """Return a reader of the first model with windows, of as many bytes as the smallest state of the others.

    States are those that the engine stores in `state_dtype`. Models with softmax layers count only if there are no
    others, because their memory grows. None: the first model is converted itself, or no other one is."""
    teacher = readers[0]
    converted = [reader for reader in readers if isinstance(reader.model, T2RModel)]
    if not converted or teacher in converted:
        return None
    pure = [reader for reader in converted if feature_sizes(reader.model) is not None]
    for reader in (teacher, *(pure or converted)):
        reader.read_until(1)
    state = min(reader.held_bytes() for reader in pure or converted)
    if state_dtype is not None:
        state = state * state_dtype.itemsize // torch.float32.itemsize
    size = max(1, state // teacher.held_bytes())
    narrow = with_windows(teacher.model, size)
    return Reader(f"{teacher.name}, window of {size:,}", narrow, teacher.batch, teacher.seed)
