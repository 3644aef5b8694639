"""Logits a slice at a time, for training and evaluation.

With a vocabulary of 50,000 the logits of a batch are by far its largest tensor. `Readout` runs a model once up to the
input of its output embeddings and then applies these to as many positions as fit. Nothing is hooked into the model, so
other threads can use it meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE = {"cpu": 1 << 25}
LARGE = 1 << 28
"""How many logits are formed at a time: 128 MB of float32 on a CPU, 1 GB on an accelerator."""
PROBE = 8
"""Positions of the first row on which a readout is verified."""


def logits_at_once(device: torch.device) -> int:
    return AT_ONCE.get(device.type, LARGE)


def widened(logits: Tensor) -> Tensor:
    """In float32, or in more where they have more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Readout:
    """A model as two parts: the body, which gives `states`, and the head, which gives the logits of any of them.

    The parts are verified on an example of the inputs: together they must give the model's own logits exactly. Where
    they do not (T5 scales what enters its head, FSMT has no separate head), `split` is False: the states are then the
    logits themselves, and calling the readout on them changes nothing.

    Args:
        model: a language model or an encoder-decoder, also one with LoRA adapters.
        example: inputs of the kind that will be read, `[batch, time]` each.
    """

    def __init__(self, model: Any, example: Mapping[str, Tensor]) -> None:
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        body = self.model.base_model
        self.body = None if body is self.model else body
        self.head = self.model.get_output_embeddings()
        self.finish: Callable[[Tensor], Tensor] | None = None
        self.split, self.out_features = self._verify(example)

    @property
    def projection(self) -> Any:
        """What `distillation_loss` takes as a head: the linear layer where nothing follows it, otherwise the readout.
        None where the states are logits."""
        if not self.split:
            return None
        return self.head if self.finish is None and type(self.head) is nn.Linear else self

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """`[batch, time, hidden]`, or the logits `[batch, time, vocabulary]` where the parts cannot be run apart."""
        if not self.split:
            return self._whole(inputs)
        return self._body(inputs)

    def __call__(self, states: Tensor) -> Tensor:
        """The logits of states of any shape `[..., hidden]`, in the model's own dtype."""
        if not self.split:
            return states
        logits: Tensor = self.head(states)
        return logits if self.finish is None else self.finish(logits)

    def rows_at_once(self, batch: Tensor) -> int:
        """How many rows of a batch `[rows, time]` to read at a time: all, or where whole logits are formed as many as
        have room."""
        if self.split:
            return len(batch)
        return max(1, logits_at_once(batch.device) // max(1, batch.shape[1] * self.out_features))

    def _body(self, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self.body is not None
        options = {"use_cache": False} if accepts(self.body.forward, "use_cache") else {}
        out = self.body(**inputs, **options)
        states: Tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
        return states

    def _whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def _verify(self, example: Mapping[str, Tensor]) -> tuple[bool, int]:
        """Whether body and head give the model's logits, and the size of the vocabulary. Sets what follows the head."""
        probe = {name: x[:1, :PROBE] for name, x in example.items()}
        if "position_ids" in probe:  # packed documents: one ends within the probe
            positions = probe["position_ids"]
            probe["position_ids"] = (torch.arange(positions.shape[1], device=positions.device) % 5)[None]
        # In evaluation mode nothing is drawn at random, which a resumed run would draw once more. Compiled layers are
        # not compiled again for this shape.
        with evaluating(self.model), torch.compiler.set_stance("force_eager"):
            logits = self._whole(probe)
            size = logits.shape[-1]
            if self.body is None or self.head is None or not hasattr(self.head, "in_features"):
                return False, size
            states = self._body(probe)
            if states.shape[:-1] != logits.shape[:-1] or states.shape[-1] != self.head.in_features:
                return False, size
            from_head = self.head(states)
            for finish in (None, *finishes(self.model)):
                found = from_head if finish is None else finish(from_head)
                if torch.equal(found.to(logits.dtype), logits):
                    self.finish = finish
                    return True, size
        return False, size


def finishes(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """What may follow the output embeddings in models of transformers. Which of these does is found by comparison."""
    config = model.config.get_text_config()
    if getattr(model, "final_logits_bias", None) is not None:  # BART's descendants
        yield lambda logits: logits + model.final_logits_bias
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        yield lambda logits: torch.tanh(logits / cap) * cap
    if scale := getattr(config, "logits_scaling", None):  # Granite
        yield lambda logits: logits / scale


def accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """No gradients and no dropout; afterwards each model is as it was.

    Not inference_mode: a table of positions that a model makes at its first use would then be one that it can
    never train with, and evaluation is done in the middle of training too.
    """
    training = [module for model in models if model is not None for module in model.modules() if module.training]
    try:
        for model in models:
            if model is not None and training:
                model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
