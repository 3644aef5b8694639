"""Sites whose feature map can be merged into the projections of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r.attention.joint import Joint, joinable
from t2r.attention.recurrence import Recurrence
from t2r.feature_maps import AffineMap, FeatureMap, split_heads
from t2r.ops.constants import derived_once


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class MergedProjections(nn.Module):
    """Projections of queries and keys that include the affine part of the feature map and the query scale.

    As in the paper, they compute features directly from hidden states, without q and k."""

    def __init__(self, hidden: int, source: int, feature_map: AffineMap) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, feature_map.num_heads * feature_map.rows)
        self.k = nn.Linear(source, feature_map.key_heads * feature_map.key_rows)

    def queries(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate(self.project_queries(x, feature_map))

    def keys(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate_keys(self.project_keys(x, feature_map))

    def project_queries(self, x: Tensor, feature_map: AffineMap) -> Tensor:
        """Compute the outputs of the affine part for queries, `[batch, heads, time, rows]`."""
        return split_heads(self.q(x), feature_map.rows)

    def project_keys(self, x: Tensor, feature_map: AffineMap) -> Tensor:
        """Compute the outputs of the affine part for keys, `[batch, key_heads, time, key_rows]`."""
        return split_heads(self.k(x), feature_map.key_rows)


class Mergeable(Recurrence):
    """A site that gives access to its projections, so that `t2r.merge` can merge the feature map into them."""

    scaling: float
    merge_obstacle: str | None = None
    """The reason why this site cannot be merged, or None if it can."""

    @property
    def merged(self) -> MergedProjections | None:
        """The merged projections, or None before a merge."""
        merged: Any = self._modules.get("merged_projections")
        return merged

    @property
    def value_projection(self) -> nn.Module:
        """The layer that computes nothing but values, after a merge."""
        raise NotImplementedError

    def heads(self, x: Tensor) -> Tensor:
        """Split `[batch, time, heads * head_dim]` into `[batch, heads, time, head_dim]`."""
        raise NotImplementedError

    def values(self, hidden_states: Tensor) -> Tensor:
        """Compute the values only, `[batch, heads, time, head_dim]`. Used after a merge."""
        return self.heads(self.value_projection(hidden_states))

    def query_key_projections(self) -> tuple[Affine, Affine]:
        """Return weight `[heads * head_dim, hidden]` and bias of the query projection and of the key projection."""
        raise NotImplementedError

    def drop_query_key_projections(self) -> None:
        """Remove the projections of queries and keys."""
        raise NotImplementedError

    def attend_merged(self, x: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """Compute causal self attention from merged projections, `[batch, heads, time, head_dim]`."""
        assert self.merged is not None and isinstance(self.feature_map, AffineMap)
        q, k, v = self.project_merged(x, self.merged, self.feature_map)
        if (features := self.fused(q, v, mask, layer)) is None:
            q, k = self.feature_map.activate(q), self.feature_map.activate_keys(k)
        return self.advance(q, k, v, mask, layer, features, x)

    def project_merged(
        self, x: Tensor, merged: MergedProjections, feature_map: AffineMap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of the activation, and values."""
        q, k, v = self.outputs(x, merged.q, merged.k, self.value_projection)
        return split_heads(q, feature_map.rows), split_heads(k, feature_map.key_rows), self.heads(v)

    def outputs(self, x: Tensor, *layers: nn.Module) -> list[Tensor]:
        """Compute the outputs of projections of x. In `generate`, those of one token are one product."""
        if x.shape[1] == 1:
            joint = derived_once(self, "joint", lambda: Joint.of(layers) if joinable(layers) else None)
            if joint is not None:
                return joint.outputs(x)
        return [layer(x) for layer in layers]

    def frozen_parameters(self) -> list[nn.Parameter]:
        return super().frozen_parameters() if self.merged is None else list(self.parameters())

    def become_merged(self) -> None:
        """Replace the projections of queries and keys, and the affine part of the map, by new merged projections."""
        assert isinstance(self.feature_map, AffineMap)
        (q, _), (k, _) = self.query_key_projections()
        with torch.device(q.device):
            merged = MergedProjections(q.shape[1], k.shape[1], self.feature_map)
        self.merged_projections = merged.to(q.dtype)
        self.drop_query_key_projections()
        self.feature_map.drop_affine()
