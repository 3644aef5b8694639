"""One decoding step for all rows of a static cache: captured once, then replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from t2r.errors import T2RError
from t2r.generation.engine.recording import CannotRecord, Recording
from t2r.generation.engine.request import accepts

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Steps before a capture: kernels are compiled and libraries are initialized outside of the graph."""


class DecodeStep:
    """The forward of one token for every row, at fixed addresses.

    `run` reads `tokens [rows, 1]`, advances the cache and fills `logits [rows, vocabulary]`, in float32 as `generate`
    computes with them. A row that is `greedy` finds its next token in `tokens` already: the likeliest one. A row
    that is not `active` stays at position 0, whatever it reads.

    On a GPU the step is a CUDA graph, on a CPU a `Recording`; elsewhere it runs as it is.
    """

    def __init__(self, model: Any, rows: int, max_length: int | None, source: Tensor | None = None) -> None:
        self.model, self.rows, self.max_length = model, rows, max_length
        seq2seq = bool(model.config.is_encoder_decoder)
        if seq2seq and model.kept_layers():
            raise T2RError("cross attention that kept softmax has no state of fixed size")
        self.cache = model.make_static_cache(rows=rows, max_length=max_length)
        self.own = self.cache.self_attention_cache if seq2seq else self.cache
        self.cross = self.cache.cross_attention_cache.layers if seq2seq else []
        device = model.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.active = torch.zeros(rows, dtype=torch.long, device=device)
        self.greedy = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.logits = torch.empty(0)
        # The states of a source are filled: what stands for the source is never read.
        self.source = None if source is None else source.new_zeros(rows, 1, source.shape[-1])
        self.takes_positions = accepts(model, "position_ids")
        self.own.only_steps(by_row=False)
        self.reset()
        self.replay = self.capture()
        self.reset()

    def reset(self) -> None:
        """Empty all rows."""
        self.own.reset()
        self.active.zero_()
        for i, layer in enumerate(self.cross):
            layer.reset()
            layer.length = 1  # filled: a source is never read in a step
            self.cache.is_updated[i] = True

    def put(self, row: int, cache: Any, other_row: int, token: Tensor | int, greedy: bool) -> None:
        """Make one sequence of a prefilled cache a row, and say which token it reads next."""
        own = cache.self_attention_cache if self.cross else cache
        self.own.put(row, own, other_row)
        for layer, other in zip(self.cross, cache.cross_attention_cache.layers if self.cross else [], strict=True):
            layer.put(row, other, other_row)
        self.tokens[row] = token
        self.active[row] = 1
        self.greedy[row] = greedy

    def free(self, row: int) -> None:
        self.active[row] = 0

    def forward(self) -> None:
        self.own.lengths.mul_(self.active)
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        if self.source is not None:
            mask = self.own.step_inputs()["attention_mask"]
            inputs |= {"decoder_input_ids": self.tokens, "decoder_attention_mask": mask}
            inputs["encoder_outputs"] = BaseModelOutput(self.source)
        else:
            inputs |= {"input_ids": self.tokens, **self.own.step_inputs()}
            if not self.takes_positions:
                del inputs["position_ids"]
        logits = self.model(**inputs).logits[:, -1]
        if not self.logits.numel():
            self.logits = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        self.logits.copy_(logits)
        best = self.logits.argmax(-1, keepdim=True)
        self.tokens.copy_(torch.where(self.greedy, best, self.tokens))

    def run(self) -> None:
        """One token for every row. Nothing waits for the device."""
        self.replay()

    # --- Capture --------------------------------------------------------------------------------------------

    def capture(self) -> Callable[[], None]:
        kind = self.tokens.device.type
        if kind == "cuda":
            return self.captured()
        with torch.no_grad():
            self.forward()  # what a model computes once (a table of positions) is made before
        if kind == "cpu":
            try:
                return self.recorded()
            except CannotRecord as reason:
                logger.info("the decoding step runs as it is: %s", reason)
        return self.eager

    @torch.no_grad()
    def eager(self) -> None:
        self.forward()

    def recorded(self) -> Callable[[], None]:
        inputs = [self.tokens, self.active, self.greedy]
        outputs = [self.tokens, self.logits, self.own.lengths, *self.own.tensors()]
        with torch.inference_mode():
            recording = Recording(self.forward, inputs, outputs)

        def replay() -> None:
            with torch.inference_mode():
                recording()

        return replay

    @torch.no_grad()
    def captured(self) -> Callable[[], None]:
        device = self.tokens.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.reset()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()
        return self.graph.replay
