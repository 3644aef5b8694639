"""Cache layers: the recurrent state of a site, and functions for layers of both kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from t2r.errors import T2RError
from t2r.ops import Features, State, absorb, linear_attention, step


class Added(NamedTuple):
    """What one forward added to a state, recorded so that `crop` can remove tokens."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    decay: Tensor | None = None  # of the feature map: it has no batch dimension


class RecurrentLayer(CacheLayerMixin):
    """The recurrent state of a layer: a `State` of fixed size, and the number of tokens processed.

    For causal attention, the state advances with every token. For cross attention, it is computed once from the source.
    Tokens cannot be removed from a state. After `activate_past_recording`, the layer records what was added since the
    last `crop` and can be cropped that far, as assisted decoding requires.
    """

    is_sliding = False
    only_real_tokens = False
    """If True, masks are ignored: none of the following tokens is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.length = 0
        self.record_past = False
        self.recorded: list[Added] = []
        self.before: State | None = None

    def advance(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        starts: Tensor | None,
        decay: Tensor | None,
        signed: bool,
        features: Features | None = None,
    ) -> Tensor:
        """Process one or more tokens: return their outputs and advance the state. For `features` see `ops.step`."""
        state, time = self.state, phi_k.shape[2]
        if state is not None and state.s.device != phi_q.device:
            state = state.map(lambda x: x.to(phi_q.device))
        how: dict[str, Any] = {"mask": mask, "decay": decay, "signed": signed}
        if time == 1 and state is not None and starts is None:
            out, state = step(phi_q, phi_k, v, state, inplace=self.may_overwrite(state), features=features, **how)
        else:
            out, state = linear_attention(phi_q, phi_k, v, state=state, starts=starts, **how)
        self.store(state, time, Added(phi_k, v, mask, decay))
        return out

    def can_step(self, mask: Tensor | None) -> bool:
        """Return whether `advance` will process one token by `ops.step`, and needs its features for nothing else."""
        documents = mask is not None and mask.dtype != torch.bool and not self.only_real_tokens
        return self.state is not None and not documents and not self.record_past

    def may_overwrite(self, state: State) -> bool:
        """Return whether a step may update the state in place, which avoids allocations and recompilation.

        Gradients and recording need the previous state. A state created in inference mode can only be updated there."""
        if torch.is_grad_enabled() or self.record_past:
            return False
        if torch.compiler.is_compiling():  # inference mode cannot be queried while compiling
            return True
        return torch.is_inference_mode_enabled() or not state.s.is_inference()

    def store(self, state: State, tokens: int, added: Added | None = None) -> None:
        """Store the new state after `tokens` more tokens."""
        if self.record_past and added is not None:
            if not self.recorded:
                self.before = self.state
            self.recorded.append(added)
        self.state, self.length, self.is_initialized = state, self.length + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the state is created with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged. Stock modules call this before the attention function, which advances
        the state."""
        return key_states, value_states

    @property
    def position(self) -> Tensor | None:
        """The position of the next token of each row in a mask of fixed size, `[rows]`. None means at its end."""
        return None

    def get_seq_length(self) -> Any:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.s.shape[0]

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.record_past

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        known = sum(added.k.shape[2] for added in self.recorded)
        if not 0 <= -tokens_to_remove <= known:
            raise T2RError(
                f"cannot crop by {tokens_to_remove}: only recorded tokens can be removed from a recurrent state "
                f"({known} tokens since the last crop). Call cache.activate_past_recording() first, and pass the "
                "number of tokens to remove as a negative number"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (transformers passes a negative number) and clear the record."""
        self.check_crop(tokens_to_remove)
        remove = -tokens_to_remove
        if remove:
            k = torch.cat([added.k for added in self.recorded], dim=2)[:, :, :-remove]
            v = torch.cat([added.v for added in self.recorded], dim=2)[:, :, :-remove]
            masks = [
                torch.ones_like(a.k[:, 0, :, 0], dtype=torch.bool) if a.mask is None else a.mask for a in self.recorded
            ]
            assert self.state is not None
            before = self.state.map(torch.zeros_like) if self.before is None else self.before
            mask = torch.cat(masks, dim=1)[:, :-remove]
            self.state = absorb(before, k, v, mask=mask, decay=self.recorded[0].decay)
            self.length -= remove
        self.recorded, self.before = [], None

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.each_row(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.each_row(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.each_row(lambda x: x[indices])

    def offload(self) -> None:
        self.each_row(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Do nothing: the state moves to the device of the queries when it is used."""

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the batch dimension of the state and of the recorded tokens."""
        self.state = None if self.state is None else self.state.map(function)
        self.before = None if self.before is None else self.before.map(function)
        self.recorded = [
            Added(function(a.k), function(a.v), None if a.mask is None else function(a.mask), a.decay)
            for a in self.recorded
        ]


# --- Layers of either kind ----------------------------------------------------------------------------------


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the tensors of a layer by name: a state, or keys and values. Empty for layers of another kind."""
    if isinstance(layer, RecurrentLayer):
        held = {} if layer.state is None else layer.state._asdict()
    else:
        held = {name: getattr(layer, name, None) for name in ("keys", "values")}
    return {name: x for name, x in held.items() if isinstance(x, Tensor)}


def layer_kind(layer: Any) -> tuple[Any, ...]:
    """Return the type of a layer and the shapes of its tensors, without rows and tokens."""
    recurrent = isinstance(layer, RecurrentLayer)
    shapes = {name: x.shape[1:] if recurrent else (x.shape[1], x.shape[3]) for name, x in layer_tensors(layer).items()}
    return type(layer), shapes


def held_tensors(layer: Any) -> list[Tensor]:
    """Return all tensors of a layer, including recorded ones."""
    held = list(layer_tensors(layer).values())
    if isinstance(layer, RecurrentLayer):
        for kept in (layer.before or (), *layer.recorded):
            held += [x for x in kept if isinstance(x, Tensor)]
    return held


def layer_bytes(layer: Any) -> int:
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in held_tensors(layer)}.values())


def fill_layer(layer: Any, held: dict[str, Tensor], length: int) -> None:
    """Fill an empty layer with the tensors of `layer_tensors`."""
    if not held:
        return
    if isinstance(layer, RecurrentLayer):
        layer.store(State(**held), length)
        return
    layer.lazy_initialization(held["keys"], held["values"])
    layer.keys, layer.values = held["keys"], held["values"]
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length


def check_layer(layer: Any, held: dict[str, Tensor], length: Any, rows: int) -> None:
    """Raise ValueError unless these tensors are valid for this layer after `length` tokens of `rows` sequences."""
    if type(length) is not int or length < 0 or (length > 0) != bool(held):
        raise ValueError("a length without tensors, or tensors without a length")
    if not held:
        return
    if any(x.dim() < 2 or x.shape[0] != rows or not x.is_floating_point() for x in held.values()):
        raise ValueError("tensors of another batch size or dtype")
    if isinstance(layer, RecurrentLayer):
        state = State(**held)
        accumulators = {torch.float32, torch.float64}
        if state.s.dim() != 4 or state.s.dtype not in accumulators or state.z.shape != state.s.shape[:3]:
            raise ValueError("not a state")
    elif held["keys"].dim() != 4 or held["keys"].shape[:3] != held["values"].shape[:3]:
        raise ValueError("not keys and values")


def stack_layers(layer: Any, others: list[Any], align: bool) -> None:
    """Fill `layer` with the rows of all `others`. Keys and values are aligned at their end."""
    if isinstance(layer, RecurrentLayer):
        states = [other.state for other in others]
        layer.state = State(*(None if xs[0] is None else torch.cat(xs) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]
        layer.length = max(other.length for other in others)
        layer.recorded, layer.before = [], None
        return
    longest = max(other.get_seq_length() for other in others)
    if any(other.get_seq_length() != longest for other in others):
        refuse_window(layer)
        if not align:
            raise T2RError("sources of different lengths cannot be stacked if cross attention is softmax attention")
    width = max(other.keys.shape[2] for other in others)
    for name in ("keys", "values"):
        held = [getattr(other, name) for other in others]
        setattr(layer, name, torch.cat([nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in held]))


def refuse_window(layer: Any) -> None:
    if getattr(layer, "is_sliding", False):
        raise T2RError("a softmax layer with a sliding window cannot be realigned: stack states of equal length")
