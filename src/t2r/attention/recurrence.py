"""Recurrent attention sites, and the mode that selects recurrent or exact attention.

A site is a stock attention module whose class was changed to one that inherits `Recurrence` and the stock class. It
attends through its memories: a window of the last tokens, a recurrent state of those that have left it, or one of both.
Inside `exact_attention` it computes the original softmax attention with the same weights. The mode is stored per thread
and not on the module, so one model can serve many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r import ops
from t2r.attention.layers import SiteLayer
from t2r.attention.masks import Rows, padding_and_starts
from t2r.attention.memories import Memory, Shape, StateMemory, WindowMemory
from t2r.attention.observation import observe_linear
from t2r.context import current, within
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, repeat_heads
from t2r.ops.rings import How
from t2r.ops.windows import Left, advances_at_once, delayed, steps_at_once


class Inputs(NamedTuple):
    """Inputs of an attention site. Queries and keys are those that the feature map receives."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scaling: float
    causal: bool = True
    softcap: float | None = None
    hidden_states: Tensor | None = None
    """The inputs of the module, for rules with gates. None: they are not known."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines by which queries and keys of one token are still to be rotated, which the kernel of a step can
    do (`Recurrence.step_at_once`). None: they are as they should be."""


class Recurrence(nn.Module):
    """An attention site with a recurrent state, a window, or both."""

    feature_map: FeatureMap
    layer_idx: int
    keeps_softmax: bool = False
    """Whether the site always computes the softmax attention of the base model and has no map: to all tokens (see
    `ProjectionAttention.keep_softmax`), or in a sliding window."""
    window: Shape | None = None
    """The windows of its key-value heads. None: it has no window."""
    window_sizes: Tensor
    """The same as a tensor, a buffer."""
    stateful: tuple[int, ...] | None = None
    """The key-value heads that have a state. None: all."""
    state_heads: Tensor
    """The same as a tensor, a buffer of sites in which not all have one."""
    state_numbers: Tensor
    """Which state each key-value head has, -1 for none: a buffer of the same sites."""

    @property
    def exact(self) -> bool:
        """Whether this call computes exact softmax attention."""
        return self.keeps_softmax or mode_of(self) is not None

    @property
    def has_map(self) -> bool:
        return "feature_map" in self._modules

    def give_window(self, window: Shape, device: torch.device) -> None:
        """Give the site a window. The sizes are also a buffer: captured calls cannot make tensors of numbers."""
        self.window = window
        self.register_buffer("window_sizes", torch.tensor(window.sizes, device=device), persistent=False)

    def give_states(self, heads: tuple[int, ...], total: int, device: torch.device) -> None:
        """Let only some of `total` key-value heads have a state."""
        self.stateful = heads
        self.register_buffer("state_heads", torch.tensor(heads, device=device), persistent=False)
        numbers = [heads.index(h) if h in heads else -1 for h in range(total)]
        self.register_buffer("state_numbers", torch.tensor(numbers, dtype=torch.int32, device=device), persistent=False)

    def memories(self) -> tuple[Memory, ...]:
        """Return empty memories of the site."""
        found: list[Memory] = [] if self.window is None else [WindowMemory(self.window)]
        return (*found, StateMemory(state_type=self.feature_map.state_type)) if self.has_map else tuple(found)

    def make_layer(self) -> SiteLayer:
        return SiteLayer(*self.memories())

    def attend(self, inputs: Inputs, layer: Any) -> Tensor:
        """Compute causal attention of new tokens, after those in the cache: `[batch, heads, time, head_dim]`."""
        if self.window is not None:
            return self.attend_window(inputs, layer)
        q, k, v, mask, scaling = inputs[:5]
        if (features := self.fused(q, v, mask, layer, scaling)) is None:
            one = q.shape[2] == 1 and layer is not None and not torch.is_grad_enabled()
            q, k = self.feature_map.of_token(q, k, scaling) if one else self.feature_map(q * scaling, k)
        return self.advance(q, k, v, mask, layer, features, inputs.hidden_states)

    # --- A state alone --------------------------------------------------------------------------------------

    def fused(self, q: Tensor, v: Tensor, mask: Tensor | None, layer: Any, scaling: float = 1.0) -> ops.Features | None:
        """Return how the kernel of a decoding step computes the features. None: they are computed before it."""
        if q.shape[2] > 1 or not isinstance(layer, SiteLayer) or layer.recurrence is None:
            return None
        documents = mask is not None and mask.dtype != torch.bool and not layer.only_real_tokens
        if documents or not layer.recurrence.can_step():
            return None
        feature_map = self.feature_map
        return feature_map.step_features(scaling) if ops.computes_features(q, v, feature_map.feature_size) else None

    def advance(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        layer: Any,
        features: ops.Features | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of one or more tokens. With a cache layer, start from its state and advance it.

        With `features`, queries and keys are the inputs of the feature map."""
        cached, rule = isinstance(layer, SiteLayer), self.feature_map.rule(hidden_states)
        padding = starts = None
        if mask is not None and not (cached and layer.only_real_tokens):
            padding, starts = padding_and_starts(mask, phi_k.shape[2], layer.position if cached else None)
        v = v if features is not None else self.spread(v)
        if cached:
            out: Tensor = layer.recurrence.advance(
                phi_q, phi_k, v, rule, mask=padding, starts=starts, features=features
            )
            layer.count(phi_q.shape[2])
            return out
        observe_linear(self, phi_q, phi_k, v, rule, mask=padding, starts=starts)
        out, _ = rule.parallel(phi_q, phi_k, v, mask=padding, starts=starts)  # type: ignore[assignment]
        return out

    def imitate(self, inputs: Inputs) -> Tensor:
        """Compute the outputs of the recurrence for these inputs, without a cache."""
        if self.window is not None:
            return self.attend_window(inputs, None)
        q, k, v, mask, scaling, causal = inputs[:6]
        phi_q, phi_k = self.feature_map(q * scaling, k)
        padding, starts = padding_and_starts(mask, k.shape[2])
        rule = self.feature_map.rule(inputs.hidden_states)
        out, _ = rule.parallel(phi_q, phi_k, self.spread(v), mask=padding, starts=starts, causal=causal)
        return out  # type: ignore[return-value]

    def imitate_window(self, inputs: Inputs) -> Tensor | None:
        """Compute the outputs of the window alone, without a cache. None: the site has no window."""
        if self.window is None:
            return None
        near, _, rows = self.attend_near(inputs, None)
        return rows.unpacked(near[0].numerator)

    def frozen_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are never trained: those of a map that is not trainable, and those of the stock
        module that the recurrence does not use. Distributed training fails if one without a gradient requires it."""
        return list(self.feature_map.parameters()) if self.has_map and not self.feature_map.trainable else []

    def spread(self, v: Tensor) -> Tensor:
        """Repeat values for every key head of the feature map. With un-grouped keys, this is one per query head."""
        return repeat_heads(v, self.feature_map.key_heads)

    # --- A window, and a state of what has left it ----------------------------------------------------------

    def attend_window(self, inputs: Inputs, layer: Any) -> Tensor:
        """Attend to the window, and with the state to what has left it. Both have one denominator."""
        if self.window_sizes.is_floating_point():
            return self.attend_softly(inputs)
        if (at_once := self.step_at_once(inputs, layer)) is not None:
            return at_once
        if inputs.rotation is not None:
            inputs = rotated(inputs)
        near, left, rows = self.attend_near(inputs, layer)
        parts = near
        if (features := self.fused_beside(near, inputs, rows, layer)) is not None:
            (means, _, _, logs), places = near[0], None if self.stateful is None else self.state_heads
            assert left is not None and logs is not None
            beside = ops.Beside(means, logs, places)
            rule = self.feature_map.rule(inputs.hidden_states)
            how: dict[str, Any] = {"mask": left.valid, "features": features, "beside": beside}
            out: Tensor = layer.recurrence.advance(inputs.q, left.k, left.v, rule, **how)
            layer.count(1)
            return out
        if self.has_map:
            parts = [*near, self.attend_far(rows.packed(inputs.q), left, inputs, rows, layer)]
        if layer is not None:
            layer.count(inputs.q.shape[2])
        if len(parts) == 1:
            return rows.unpacked(parts[0].numerator)
        return rows.unpacked(ops.combine(parts, inputs.v.dtype))

    def attend_softly(self, inputs: Inputs) -> Tensor:
        """Attend to a window with soft edges, which is alone: it is how a plan is looked for (`t2r.budgets`)."""
        rows = Rows.of(*padding_and_starts(inputs.mask, inputs.q.shape[2]))
        if self.has_map or rows.origin is not None:
            raise T2RError("windows with soft edges require one document in each row, and no states")
        q, k, v = map(rows.packed, inputs[:3])
        assert self.window is not None
        windows = ops.Windows(self.window_sizes, self.window.sinks, max(self.window.sizes))
        scaling, softcap = inputs.scaling, inputs.softcap
        return rows.unpacked(ops.soft_window_attention(q, k, v, windows, scaling=scaling, softcap=softcap))

    def step_at_once(self, inputs: Inputs, layer: Any) -> Tensor | None:
        """Attend with one token to the windows and the states in one kernel. None: it takes more than one."""
        if not isinstance(layer, SiteLayer) or layer.window is None or inputs.q.shape[2] > 1:
            return None
        how, far = How(inputs.scaling, inputs.softcap), None
        masked = inputs.mask is not None and not layer.only_real_tokens
        if masked or not layer.window.steps_at_once(inputs.q, inputs.v, how):
            return None
        if self.has_map and (far := self.far(inputs, layer)) is None:
            return None
        out = layer.window.attend_at_once(*inputs[:3], how, far, inputs.rotation)
        layer.count(1)
        return out

    def far(self, inputs: Inputs, layer: SiteLayer) -> ops.Far | None:
        """Return the states as the kernel of the windows advances them. None: it cannot."""
        memory, features = layer.recurrence, self.fused(inputs.q, inputs.v, None, layer, inputs.scaling)
        rule = self.feature_map.rule(inputs.hidden_states)
        if memory is None or memory.state is None or features is None or not isinstance(rule, ops.Sum):
            return None
        if memory.state[0].device != inputs.q.device or not memory.overwrites(memory.state):
            return None
        heads = inputs.k.shape[1] if self.stateful is None else len(self.stateful)
        numbers = None if self.stateful is None else self.state_numbers
        far = ops.Far(memory.state, features, rule.decay, numbers, memory.slots, memory.draws)
        return far if rule.heads == heads and advances_at_once(far) else None

    def fused_beside(self, near: list[ops.Sums], inputs: Inputs, rows: Rows, layer: Any) -> ops.Features | None:
        """Return how the kernel of a step adds the state to the window. None: they are added here."""
        if not (self.has_map and layer is not None and rows.mask is None):
            return None
        if not steps_at_once(inputs.q, inputs.v, inputs.softcap):
            return None
        return self.fused(inputs.q, inputs.v, None, layer, inputs.scaling)

    def attend_near(self, inputs: Inputs, layer: Any) -> tuple[list[ops.Sums], Left | None, Rows]:
        """Attend to the window. Returns also what leaves it, if there is a state; real tokens first in their rows."""
        time = inputs.q.shape[2]
        cached = isinstance(layer, SiteLayer)
        mask = None if cached and layer.only_real_tokens else inputs.mask
        rows = Rows.of(*padding_and_starts(mask, time, layer.position if cached else None))
        q, k, v = map(rows.packed, inputs[:3])
        assert self.window is not None
        # The tensor of sizes, not the numbers: layers with different windows would then be compiled one by one.
        windows, how = ops.Windows(self.window_sizes, self.window.sinks), How(inputs.scaling, inputs.softcap)
        if cached:
            near, left = layer.window.attend(q, k, v, windows, rows.mask, how, leaves=self.has_map)
            return near, left, rows
        k, v = self.window.rounded(k, v)
        near = [ops.window_attention(q, k, v, windows, scaling=how.scaling, origin=rows.origin, softcap=how.softcap)]
        return near, delayed(k, v, windows, rows.origin) if self.has_map else None, rows

    def attend_far(self, q: Tensor, left: Left | None, inputs: Inputs, rows: Rows, layer: Any) -> ops.Sums:
        """Return what the state says about tokens that have left the window."""
        assert left is not None
        heads, total = self.stateful, self.window_sizes.shape[0]
        if heads is not None:
            q, left = of_heads(q, heads, total), Left(*(of_heads(x, heads, total) for x in left))
        feature_map, rule = self.feature_map, self.feature_map.rule(inputs.hidden_states)
        phi_q, phi_k = feature_map(q * inputs.scaling, left.k)
        phi_k = phi_k.masked_fill(~repeat_heads(left.valid, feature_map.key_heads)[..., None], 0)
        v = self.spread(left.v)
        if layer is None:
            sums, _ = rule.parallel(phi_q, phi_k, v, mask=rows.mask, starts=rows.starts, normalized=False)
        else:
            sums = layer.recurrence.advance(phi_q, phi_k, v, rule, mask=rows.mask, normalized=False)
        assert isinstance(sums, ops.Sums)
        sums = sums._replace(peak=feature_map.query_logs(q * inputs.scaling))
        return sums if heads is None else all_heads(sums, heads, total)


def rotated(inputs: Inputs) -> Inputs:
    """Rotate the queries and keys of a token that are still to be rotated."""
    from t2r.ops.triton.rotation import rotated

    assert inputs.rotation is not None
    q, k = rotated(inputs.q, inputs.k, *inputs.rotation)
    return inputs._replace(q=q, k=k, rotation=None)


def of_heads(x: Tensor, heads: tuple[int, ...], total: int) -> Tensor:
    """Return the heads of x that belong to some of `total` key heads."""
    group = x.shape[1] // total
    return torch.cat([x[:, h * group : (h + 1) * group] for h in heads], dim=1)


def all_heads(sums: ops.Sums, heads: tuple[int, ...], total: int) -> ops.Sums:
    """Return sums for all key heads. Those of heads without a state are empty."""
    group = sums.numerator.shape[1] // len(heads)

    def spread(x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x[:, :group])] * total
        for i, h in enumerate(heads):
            parts[h] = x[:, i * group : (i + 1) * group]
        return torch.cat(parts, dim=1)

    peak = None if sums.peak is None else spread(sums.peak)
    return ops.Sums(spread(sums.numerator), spread(sums.denominator), peak=peak)


def recurrent_sites(model: nn.Module) -> list[Recurrence]:
    """Return all recurrent sites of a model, from the first layer to the last."""
    return [m for m in model.modules() if isinstance(m, Recurrence) and m.has_map]


def swapped_sites(model: nn.Module) -> list[Recurrence]:
    """Return all sites that do not compute what the base model does: those with a state, and those with windows."""
    return [m for m in model.modules() if isinstance(m, Recurrence) and not m.keeps_softmax]


def computes_exactly(model: nn.Module) -> bool:
    """Return whether swapped sites of the model now compute exact attention, in this thread."""
    return any(mode_of(site) is not None for site in swapped_sites(model))


# --- The mode of a thread -----------------------------------------------------------------------------------

Observer = Callable[[Recurrence, Inputs, Tensor], None]


class Mode(NamedTuple):
    """Sites that compute exact softmax attention in the calls of one thread."""

    sites: frozenset[int]
    observer: Observer | None
    outer: Mode | None


def mode_of(site: Recurrence) -> Mode | None:
    """Return the innermost mode of this thread that includes the site, or None for the recurrence."""
    mode: Mode | None = current("mode")
    while mode is not None and id(site) not in mode.sites:
        mode = mode.outer
    return mode


def exact_somewhere() -> bool:
    """Return whether some recurrent site computes exact attention now, in this thread."""
    return current("mode") is not None


@contextmanager
def exact_attention(
    model: nn.Module, *, recurrent_layers: Collection[int] = (), observer: Observer | None = None
) -> Iterator[None]:
    """Compute exact softmax attention in all recurrent sites, inside the `with` block and in this thread.

    The equivalence check compares it with the base model, and the transfer stage uses its outputs as targets.
    With gradient checkpointing, `backward` computes the layers again: call it inside the block too.

    Args:
        recurrent_layers: layers that stay recurrent.
        observer: called at each site with the site, the inputs of the recurrence, and the exact output.

    Raises:
        T2RError: the model is merged.
    """
    sites = [site for site in swapped_sites(model) if site.layer_idx not in recurrent_layers]
    if any(getattr(site, "merged", None) is not None for site in sites):
        raise T2RError("a merged model cannot compute softmax attention, because it has no queries and keys")
    with within(mode=Mode(frozenset(map(id, sites)), observer, current("mode"))):
        yield
