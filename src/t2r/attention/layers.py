"""The layers of a cache: the recurrent state of one site, and what it shares with layers of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from t2r.errors import T2RError
from t2r.ops import State, absorb, linear_attention, step


class Added(NamedTuple):
    """What one forward added to a state, kept so that some of it can be taken back."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    decay: Tensor | None = None  # of the map, not of a row of the batch


class RecurrentLayer(CacheLayerMixin):
    """One layer's memory of everything it has read: a `State` of fixed size, and how many tokens made it.

    For causal attention it advances with every token; for cross attention it is filled once, from the source.
    A state cannot be unread; but after `activate_past_recording` the layer keeps what was added since the last
    `crop`, and can go back that far. That is all that assisted decoding asks of it.
    """

    is_sliding = False
    only_real_tokens = False
    """None of the tokens to come is padding, whatever the mask says."""

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
    ) -> Tensor:
        """Read one token or many: their outputs, given all that came before. The state is advanced."""
        state, time = self.state, phi_k.shape[2]
        if state is not None and state.s.device != phi_q.device:
            state = state.map(lambda x: x.to(phi_q.device))
        how: dict[str, Any] = {"mask": mask, "decay": decay, "signed": signed}
        if time == 1 and state is not None and starts is None:
            out, state = step(phi_q, phi_k, v, state, inplace=self.may_overwrite(state), **how)
        else:
            out, state = linear_attention(phi_q, phi_k, v, state=state, starts=starts, **how)
        self.store(state, time, Added(phi_k, v, mask, decay))
        return out

    def may_overwrite(self, state: State) -> bool:
        """Whether a step may update the state in place: nothing is allocated then, and a compiled step stays valid.

        Gradients and recorded steps need the state before. A state made in inference mode can be changed only there."""
        if torch.is_grad_enabled() or self.record_past:
            return False
        if torch.compiler.is_compiling():  # which cannot ask about inference mode
            return True
        return torch.is_inference_mode_enabled() or not state.s.is_inference()

    def store(self, state: State, tokens: int, added: Added | None = None) -> None:
        """Keep the state after `tokens` more."""
        if self.record_past and added is not None:
            if not self.recorded:
                self.before = self.state
            self.recorded.append(added)
        self.state, self.length, self.is_initialized = state, self.length + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the state appears with the first tokens that are read."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stock attention modules call this before the attention function, which is what advances the state:
        keys and values pass through."""
        return key_states, value_states

    @property
    def position(self) -> Tensor | None:
        """Where the next token of each row stands in a mask of fixed size `[rows]`; None: at its end."""
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
                f"cannot crop by {tokens_to_remove}: a recurrent state goes back only over what it recorded "
                f"({known} tokens since the last crop). Call cache.activate_past_recording() first, and pass the "
                "number of tokens to remove as a negative one"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (transformers counts them as a negative number), and forget
        how to go back further."""
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
        """The state moves to the queries' device when it is used."""

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        """Rearrange the batch, and with it what could be taken back."""
        self.state = None if self.state is None else self.state.map(function)
        self.before = None if self.before is None else self.before.map(function)
        self.recorded = [
            Added(function(a.k), function(a.v), None if a.mask is None else function(a.mask), a.decay)
            for a in self.recorded
        ]


# --- Layers of either kind ----------------------------------------------------------------------------------


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """What a layer holds, by name."""
    if isinstance(layer, RecurrentLayer):
        held = {} if layer.state is None else layer.state._asdict()
    else:
        held = {"keys": layer.keys, "values": layer.values}
    return {name: x for name, x in held.items() if isinstance(x, Tensor)}


def held_tensors(layer: Any) -> list[Tensor]:
    """Every tensor of a layer: what it knows, and what it could go back to."""
    held = list(layer_tensors(layer).values())
    if isinstance(layer, RecurrentLayer):
        for kept in (layer.before or (), *layer.recorded):
            held += [x for x in kept if isinstance(x, Tensor)]
    return held


def layer_bytes(layer: Any) -> int:
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in held_tensors(layer)}.values())


def fill_layer(layer: Any, held: dict[str, Tensor], length: int) -> None:
    """The reverse of `layer_tensors`, into an empty layer."""
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
    """Raise ValueError unless such a layer can hold these tensors after `length` tokens of `rows` sequences."""
    if type(length) is not int or length < 0 or (length > 0) != bool(held):
        raise ValueError("a length without tensors, or tensors without a length")
    if not held:
        return
    if any(x.dim() < 2 or x.shape[0] != rows or not x.is_floating_point() for x in held.values()):
        raise ValueError("not a batch of rows")
    if isinstance(layer, RecurrentLayer):
        state = State(**held)
        accumulators = {torch.float32, torch.float64}
        if state.s.dim() != 4 or state.s.dtype not in accumulators or state.z.shape != state.s.shape[:3]:
            raise ValueError("not a state")
    elif held["keys"].dim() != 4 or held["keys"].shape[:3] != held["values"].shape[:3]:
        raise ValueError("not keys and values")


def stack_layers(layer: Any, others: list[Any], align: bool) -> None:
    """Make `layer` hold the rows of all the others, keys and values aligned at their end."""
    if isinstance(layer, RecurrentLayer):
        states = [other.state for other in others]
        if any(state is None for state in states):
            raise T2RError("a cache that has read nothing cannot be stacked")
        layer.state = State(*(None if xs[0] is None else torch.cat(xs) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]
        layer.length = max(other.length for other in others)
        layer.recorded, layer.before = [], None
        return
    longest = max(other.get_seq_length() for other in others)
    if any(other.get_seq_length() != longest for other in others):
        refuse_window(layer)
        if not align:
            raise T2RError("sources of different lengths cannot be stacked where cross attention is softmax")
    width = max(other.keys.shape[2] for other in others)
    for name in ("keys", "values"):
        held = [getattr(other, name) for other in others]
        setattr(layer, name, torch.cat([nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in held]))


def refuse_window(layer: Any) -> None:
    if getattr(layer, "is_sliding", False):
        raise T2RError("a layer that kept its sliding window cannot be realigned: stack states of equal length")
