"""Beam search on the captured step. transformers' own beam search chooses the tokens.

The step reorders the rows of its cache before it advances them, so a beam that is dropped costs no extra launch. The
states of cross attention are the same for all beams of a source and stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput

from t2r import compat
from t2r.generation.engine.request import Request, seeding
from t2r.generation.engine.step import DecodeStep

BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class Beams(NamedTuple):
    """A finished beam search."""

    sequences: Tensor
    request: Request

    def result(self) -> Tensor:
        """Return prompts and generated tokens, as `generate` does."""
        return self.sequences


def uses_beams(request: Request) -> bool:
    return request.config.get_generation_mode() in BEAM_MODES


def one_per_prompt(request: Request) -> Request:
    """Return a request with one row per prompt. transformers repeats each prompt, and its source, for every beam."""
    beams, rows = request.config.num_beams, request.ids.shape[0]

    def first(x: Any) -> Any:
        if isinstance(x, ModelOutput):
            return type(x)(**{name: first(value) for name, value in x.items()})
        return x[::beams] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

    inputs = {name: first(value) for name, value in request.inputs.items()}
    return request._replace(ids=request.ids[::beams], inputs=inputs)


class BeamSearch(compat.BeamSearch):
    """The beams of several prompts in the rows of a step. Rows that are not needed are inactive."""

    def __init__(self, decode: DecodeStep, request: Request, prompts: Request, cache: Any, logits: Tensor) -> None:
        """`cache` and `logits` are those of the prefilled `prompts`, with one row per prompt."""
        super().__init__(decode.model.config)
        self.decode, self.request, self.logits = decode, request, logits
        self.rows, self.beams = request.ids.shape[0], request.config.num_beams
        decode.reset()
        rows = torch.arange(self.rows, device=request.ids.device)
        decode.put_rows(rows, cache, rows // self.beams, source_mask=prompts.source_mask)

    def run(self, seed: int | None) -> Beams:
        """Search to the end. A seed does not change torch's default generator."""
        request = self.request
        with seeding(seed, request.ids.device):
            found = self.search(request.ids, request.processors, request.criteria, request.config)
        return Beams(found, request)

    def first_logits(self) -> Tensor:
        return self.logits.repeat_interleave(self.beams, dim=0)

    def next_logits(self, tokens: Tensor) -> Tensor:
        self.decode.tokens[: self.rows, 0] = tokens
        self.decode.run()
        return self.decode.logits[: self.rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.decode.order[: self.rows] = beam_idx
