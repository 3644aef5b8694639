"""How tokens are chosen: the fields of OpenAI's API as options of `generate`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from t2r.serving.errors import ApiError
from t2r.serving.served import ServedModel

ALL_SEEDS = (1 << 63) - 1


class Choosing(NamedTuple):
    """How tokens are chosen. A field that is None has the model's own default."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return options of `generate`, without those of `penalties`, which belong to one sequence.

        A temperature of 0 is greedy search. Without a temperature, and with another option of sampling, it is 1."""
        options: dict[str, Any] = {"max_new_tokens": self.max_tokens, "pad_token_id": model.pad}
        options |= {"num_beams": 1, "num_return_sequences": 1}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        if biases := self.biases(model):
            options["sequence_bias"] = [[[token], bias] for token, bias in biases.items()]
        asked = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in asked.items() if value is not None}
        samples = bool(given) if model.defaults.do_sample is None else model.defaults.do_sample or bool(given)
        if self.temperature == 0 or not samples:
            # The model's own defaults of sampling have no effect, and transformers would say so.
            return options | {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}
        # transformers limits the choice to 50 tokens if neither the client nor the model says anything.
        own = model.defaults.top_k
        return options | {"do_sample": True, "top_k": 0 if own is None else own} | given

    def penalties(self) -> dict[str, Any]:
        """Return the options for OpenAI's penalties of one sequence."""
        if not self.presence_penalty and not self.frequency_penalty:
            return {}
        penalties = Penalties(self.presence_penalty or 0.0, self.frequency_penalty or 0.0)
        return {"logits_processor": LogitsProcessorList([penalties])}

    def biases(self, model: ServedModel) -> dict[int, float]:
        biases = {}
        for name, bias in (self.logit_bias or {}).items():
            known = name.isascii() and name.isdigit() and len(name) <= 9 and int(name) < model.vocabulary
            if not known or name != str(int(name)):  # one name for each token
                raise ApiError(f"logit_bias: {name[:40]!r} is not a token of {model.name}", param="logit_bias")
            if not -100 <= bias <= 100:
                raise ApiError("logit_bias: a bias must be from -100 to 100", param="logit_bias")
            biases[int(name)] = bias
        return {token: bias for token, bias in biases.items() if bias}


class Penalties(LogitsProcessor):
    """OpenAI's penalties: what is subtracted from the logits of tokens that were generated, and for each time.

    The first call has what is before them: a prompt, or the first tokens of a decoder."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency
        self.prompt: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.prompt is None:
            self.prompt = input_ids.shape[1]
        new: Tensor = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts
