"""A decoding step for all rows of a static cache, captured once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from t2r.generation.engine.fusion import available, fused, shortened
from t2r.generation.engine.recording import CannotRecord, NoValues, Recording
from t2r.generation.engine.request import accepts, counts_tokens
from t2r.graphs import CannotCapture, CudaGraph
from t2r.ops.constants import constant_weights

logger = logging.getLogger(__name__)


class DecodeStep:
    """The forward pass of one token for every row, with tensors at fixed addresses.

    `run` reads `tokens [rows, 1]`, advances the cache and writes `logits [rows, vocabulary]`, in float32 as in
    `generate`, with the biases of each row, of which there are at most `biases`. For `greedy` rows, it also writes the
    most likely next token to `tokens`. Rows that are not `active` stay at position 0. With `reorders`, the step first
    copies row `order[i]` of the cache to each row `i`. Beams of the same source share their cross attention, which is
    not reordered.

    The step is a CUDA graph on a GPU and a `Recording` on a CPU. On other devices it runs eagerly. With `compiled`, the
    kernels of the graph are fused by torch.compile. With `tuned`, a recording finds out with how many threads it is
    fastest.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        max_length: int | None,
        source_length: int | None = None,
        *,
        compiled: bool = False,
        reorders: bool = False,
        biases: int = 0,
        state_dtype: torch.dtype | None = None,
        tuned: bool = False,
    ) -> None:
        self.model, self.rows, self.max_length, self.source_length = model, rows, max_length, source_length
        self.biases = biases
        self.compiled, self.reorders, self.tuned = compiled, reorders, tuned
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode cannot be changed outside it
            self.allocate(state_dtype)
            self.reset()
            self.replay = self.capture()
            self.reset()

    def allocate(self, state_dtype: torch.dtype | None) -> None:
        model, rows, max_length, source_length = self.model, self.rows, self.max_length, self.source_length
        seq2seq = bool(model.config.is_encoder_decoder)
        self.cache = model.make_static_cache(rows, max_length, source_length, state_dtype)
        self.own = self.cache.self_attention_cache if seq2seq else self.cache
        self.cross = self.cache.cross_attention_cache.layers if seq2seq else []
        device = model.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.active = torch.zeros(rows, dtype=torch.long, device=device)
        self.greedy = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.order = torch.arange(rows, device=device)
        self.logits = torch.empty(0)
        # A row with fewer biases repeats a bias of zero for token 0. Each other token occurs once.
        self.biased = torch.zeros(rows, self.biases, dtype=torch.long, device=device)
        self.bias = torch.zeros(rows, self.biases, dtype=torch.float32, device=device)
        self.constants: dict[Any, Any] = {}
        self.source: Any = None
        self.source_mask: Tensor | None = None
        if seq2seq:
            # A placeholder of no size: the source has been read into the cross attention states, or keys and values.
            shape = (rows, source_length or 1, model.config.hidden_size)
            self.source = torch.zeros(1, dtype=model.dtype, device=device).expand(shape)
        if source_length is not None:
            self.source_mask = torch.zeros(rows, source_length, dtype=torch.long, device=device)
        self.takes_positions = accepts(model, "position_ids")
        counts = counts_tokens(model)
        self.by_row = not counts or model.t2r_family.positions_by_row
        self.own.only_steps(by_row=counts and self.by_row)
        self.positions: Tensor | None = model.t2r_family.position_table(model)
        """The table of positions that a captured step reads. It stays allocated if the model's table is replaced."""
        self.captured_as: str | None = None
        """`CUDA graph` or `recording`; None if the step runs eagerly."""
        self.recording: Recording | None = None

    @property
    def threads(self) -> int:
        """The number of CPU threads of the next step."""
        most = torch.get_num_threads()
        return most if self.recording is None else self.recording.threads(most)

    @property
    def outdated(self) -> bool:
        """Whether the model has replaced its table of positions by a longer one."""
        return self.positions is not self.model.t2r_family.position_table(self.model)

    def reset(self) -> None:
        """Empty all rows."""
        self.own.reset()
        self.active.zero_()
        torch.arange(self.rows, out=self.order)
        for i, layer in enumerate(self.cross):
            layer.reset()
            layer.length = 1  # marks the layer as filled, because a step does not read the source
            self.cache.is_updated[i] = True

    def put_rows(
        self,
        rows: Tensor,
        cache: Any,
        index: Tensor,
        tokens: Tensor | None = None,
        greedy: bool = False,
        source_mask: Tensor | None = None,
        biases: dict[int, float] | None = None,
    ) -> None:
        """Copy the sequences `index` of a prefilled cache to these rows, and set their next tokens and biases.

        `source_mask [rows, source]` is the padding mask of the sources, for softmax cross attention. A logit that is
        not of the vocabulary has no bias."""
        self.own.put_rows(rows, cache.self_attention_cache if self.cross else cache, index)
        for layer, other in zip(self.cross, cache.cross_attention_cache.layers if self.cross else [], strict=True):
            layer.put_rows(rows, other, index)
        if self.source_mask is not None:
            assert source_mask is not None
            self.source_mask[rows, source_mask.shape[1] :] = 0
            self.source_mask[rows, : source_mask.shape[1]] = source_mask[index].to(self.source_mask.dtype)
        if tokens is not None:
            self.tokens[rows, 0] = tokens
        self.active[rows] = 1
        self.greedy[rows] = greedy
        if self.biases:
            own = {token: bias for token, bias in (biases or {}).items() if 0 <= token < self.logits.shape[1]}
            empty = self.biases - len(own)
            self.biased[rows] = torch.tensor([*own, *[0] * empty], device=rows.device)
            self.bias[rows] = torch.tensor([*own.values(), *[0.0] * empty], device=rows.device)

    def take_over(self, rows: Tensor, other: DecodeStep, index: Tensor) -> None:
        """Copy the rows `index` of another step to these rows, which then continue as they would there."""
        self.own.put_rows(rows, other.own, index)
        for layer, given in zip(self.cross, other.cross, strict=True):
            layer.put_rows(rows, given, index)
        if self.source_mask is not None and other.source_mask is not None:
            self.source_mask[rows] = 0
            self.source_mask[rows, : other.source_mask.shape[1]] = other.source_mask[index]
        for name in ("tokens", "active", "greedy"):
            getattr(self, name)[rows] = getattr(other, name)[index]
        for name in ("biased", "bias"):
            getattr(self, name)[rows, : other.biases] = getattr(other, name)[index]

    def free(self, rows: list[int]) -> None:
        self.active[torch.tensor(rows, device=self.active.device)] = 0

    def row_bytes(self, tokens: int, source: int = 0) -> int:
        """Return the size of the cache of one sequence with this number of tokens, and of tokens of the source."""
        own = sum(layer.row_bytes(tokens) for layer in self.own.layers)
        return int(own + sum(layer.row_bytes(source) for layer in self.cross))

    def forward(self) -> None:
        if self.reorders:
            self.own.reorder_cache(self.order)
        self.own.lengths.mul_(self.active)
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        if self.source is not None:
            mask = self.own.step_inputs()["attention_mask"]
            inputs |= {"decoder_input_ids": self.tokens, "decoder_attention_mask": mask}
            inputs["encoder_outputs"] = BaseModelOutput(self.source)
            if self.source_mask is not None:
                inputs["attention_mask"] = self.source_mask
        else:
            inputs |= {"input_ids": self.tokens, **self.own.step_inputs()}
            if not self.takes_positions:
                del inputs["position_ids"]
        logits: Tensor = self.model(**inputs).logits[:, -1]
        if not self.logits.numel():
            self.logits = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        self.logits.copy_(logits)
        if self.biases:
            self.logits.scatter_add_(1, self.biased, self.bias)
        best = self.logits.argmax(-1, keepdim=True)
        torch.where(self.greedy, best, self.tokens, out=self.tokens)

    def run(self) -> None:
        """Advance every row by one token, without synchronizing with the device."""
        self.replay()

    def launches(self) -> int | None:
        """Return how many kernels, or on a CPU operations, a captured step launches. Runs a step. None: it is not
        captured."""
        if self.recording is not None:
            return len(self.recording.calls)
        if self.captured_as is None:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run()
            torch.cuda.synchronize(self.tokens.device)
        return sum(event.device_type == torch.profiler.DeviceType.CUDA for event in profile.events())

    # --- Capture --------------------------------------------------------------------------------------------

    def capture(self) -> Callable[[], None]:
        self.eager()  # computes what the model caches, such as position tables, before the capture
        kind = self.tokens.device.type
        try:
            if kind == "cuda":
                return self.captured()
            if kind == "cpu":
                return self.recorded()
        except (CannotRecord, CannotCapture) as reason:
            logger.warning("the decoding step of this model cannot be captured and runs eagerly: %s", reason)
        return self.eager

    @torch.no_grad()
    def eager(self) -> None:
        self.forward()

    def recorded(self) -> Callable[[], None]:
        inputs = [self.tokens, self.active, self.greedy, self.order, self.biased, self.bias]
        inputs += [x for layer in self.cross for x in layer.tensors().values()]  # each prefill changes the sources
        inputs += [] if self.source_mask is None else [self.source_mask]
        outputs = [self.tokens, self.logits, self.own.lengths, *self.own.tensors()]
        with torch.inference_mode(), constant_weights(self.constants), shortened(self.model, self.forward):
            recording = self.recording = Recording(self.forward, inputs, outputs, self.tuned)

        def replay() -> None:
            with torch.inference_mode():
                recording()

        self.captured_as = "recording"
        return replay

    @contextmanager
    def few_kernels(self) -> Iterator[None]:
        """Operations share kernels; what depends only on the weights is computed in the first step."""
        fewer = fused(self.model, self.own, self.forward) if available() else nullcontext()
        with constant_weights(self.constants), fewer:
            yield

    @torch.no_grad()
    def captured(self) -> Callable[[], None]:
        with NoValues():
            self.forward()
        forward = torch.compile(self.forward, dynamic=False) if self.compiled else self.forward
        device = self.tokens.device
        # One context for all steps: on entry it compares formulas, which cannot be captured.
        with torch.cuda.device(device), nullcontext() if self.compiled else self.few_kernels():
            graph = CudaGraph(forward, device)
        self.captured_as = "CUDA graph"
        return graph
