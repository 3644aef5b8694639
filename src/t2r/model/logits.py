"""Sliced computation of logits, for training and evaluation.

With a vocabulary of 50,000, the logits are by far the largest tensor of a batch. `Readout` runs a model once up to the
input of its output embeddings, which are then applied to slices of positions. No hooks are used, so other threads can
use the model at the same time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from t2r.sharding import reshard, run_inside

AT_ONCE = {"cpu": 1 << 25}
LARGE = 1 << 28
"""The number of logits computed at a time: 128 MB of float32 on a CPU, 1 GB on an accelerator."""
PROBE = 8
"""The number of positions of the first row on which a readout is verified."""


def logits_at_once(device: torch.device) -> int:
    return AT_ONCE.get(device.type, LARGE)


def widened(logits: Tensor) -> Tensor:
    """In float32, or in more where they have more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class LinearHead(NamedTuple):
    """A head whose logits are linear in the states: `weight @ (scale * states) + bias`."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, head: Any) -> LinearHead | None:
        """Return a linear layer or a linear head as a linear head, and None for any other head."""
        if type(head) is nn.Linear:
            return cls(head.weight, head.bias)
        return head if isinstance(head, cls) else None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states * self.scale, self.weight, self.bias)

    def plus(self, bias: Tensor) -> LinearHead:
        bias = bias.to(self.weight.dtype)
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    def divided(self, by: float) -> LinearHead:
        return LinearHead(self.weight, None if self.bias is None else self.bias / by, self.scale / by)


class Finish(NamedTuple):
    """An operation that follows the output embeddings."""

    of_logits: Callable[[Tensor], Tensor]
    of_head: Callable[[LinearHead], LinearHead] | None = None
    """The same as a change of a linear head; None if logits are then not linear in the states."""


class Readout:
    """A model split into its body, which computes `states`, and its head, which computes logits from them.

    The split is verified on example inputs: body and head must reproduce the model's logits exactly. If they do not (T5
    scales the input of its head, FSMT has no separate head), `split` is False: `states` returns the logits, and calling
    the readout returns its input unchanged.

    Args:
        model: a language model or an encoder-decoder, with or without LoRA adapters.
        example: inputs with the same names and kinds as later inputs, each `[batch, time]`.
    """

    def __init__(self, model: Any, example: Mapping[str, Tensor]) -> None:
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        body = self.model.base_model
        self.body = None if body is self.model else body
        self.head = self.model.get_output_embeddings()
        self.finish: Finish | None = None
        self.split, self.out_features = self._verify(example)

    @property
    def projection(self) -> Any:
        """The head for `distillation_loss`: a `LinearHead` if logits are linear in the states, otherwise the readout.

        None if the states are logits."""
        if not self.split:
            return None
        head = LinearHead.of(self.head)
        if head is None or self.finish is None:
            return head or self
        return self if self.finish.of_head is None else self.finish.of_head(head)

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return hidden states `[batch, time, hidden]`, or logits `[batch, time, vocabulary]` if `split` is False."""
        if not self.split:
            return self._whole(inputs)
        return self._body(inputs)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of states `[..., hidden]`, in the dtype of the model."""
        if not self.split:
            return states
        logits: Tensor = self.head(states)
        return logits if self.finish is None else self.finish.of_logits(logits)

    def rows_at_once(self, batch: Tensor) -> int:
        """Return how many rows of a batch `[rows, time]` to process at a time: all if `split`, otherwise as many as the
        limit on logits allows."""
        if self.split:
            return len(batch)
        return max(1, logits_at_once(batch.device) // max(1, batch.shape[1] * self.out_features))

    def _body(self, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self.body is not None
        options = {"use_cache": False} if takes(self.body.forward, "use_cache") else {}
        out = run_inside(self.model, self.body, dict(inputs) | options)
        states: Tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0]
        return states

    def _whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def _verify(self, example: Mapping[str, Tensor]) -> tuple[bool, int]:
        """Return whether body and head reproduce the logits, and the vocabulary size. Sets `finish`."""
        probe = {name: x[:1, :PROBE] for name, x in example.items()}
        if "position_ids" in probe:  # packed documents: the probe must contain a document boundary
            positions = probe["position_ids"]
            probe["position_ids"] = (torch.arange(positions.shape[1], device=positions.device) % 5)[None]
        # Evaluation mode keeps the random state unchanged, which a resumed run depends on.
        with evaluating(self.model), eager():
            logits = self._whole(probe)
            size = logits.shape[-1]
            if self.body is None or self.head is None or not hasattr(self.head, "in_features"):
                return False, size
            states = self._body(probe)
            if states.shape[:-1] != logits.shape[:-1] or states.shape[-1] != self.head.in_features:
                return False, size
            from_head = self.head(states)
            for finish in (None, *finishes(self.model)):
                found = from_head if finish is None else finish.of_logits(from_head)
                if torch.equal(found.to(logits.dtype), logits):
                    self.finish = finish
                    return True, size
        return False, size


_STANCE = threading.Lock()


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled layers without compiling them, e.g. for a shape that is used once.

    The stance belongs to the process. Two threads that change it at the same time would restore each other's."""
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield


def finishes(model: Any) -> Iterator[Finish]:
    """Yield the operations that may follow the output embeddings. The right one is found by comparing logits."""
    config = model.config.get_text_config()
    if getattr(model, "final_logits_bias", None) is not None:  # BART and derived models
        yield Finish(
            lambda logits: logits + model.final_logits_bias, lambda head: head.plus(model.final_logits_bias.flatten())
        )
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        yield Finish(lambda logits: torch.tanh(logits / cap) * cap)
    if scale := getattr(config, "logits_scaling", None):  # Granite
        yield Finish(lambda logits: logits / scale, lambda head: head.divided(scale))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes a keyword argument of this name, also among any others (`**kwargs`)."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def last_only(model: Any) -> dict[str, int]:
    """Return the argument with which a model computes the logits of the last position only, if it has one."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Disable gradients and set evaluation mode. The training mode of each module is restored afterwards.

    inference_mode is not used because a position table that a model creates on first use could then never be used in
    training, and evaluation also runs during training.
    """
    training = [module for model in models if model is not None for module in model.modules() if module.training]
    try:
        for model in models:
            if model is not None and training:
                model.eval()
        with torch.no_grad():
            yield
    finally:
        for model in models:
            reshard(model)
        for module in training:
            module.training = True
