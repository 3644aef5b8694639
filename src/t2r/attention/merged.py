"""Sites whose feature map can be folded into the projections of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r.attention.recurrence import Recurrence
from t2r.feature_maps import AffineMap, FeatureMap


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class MergedProjections(nn.Module):
    """The queries' and keys' projections with the map's affine part and the query scale folded in, as in the paper:
    q and k are never formed."""

    def __init__(self, hidden: int, source: int, feature_map: AffineMap) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, feature_map.num_heads * feature_map.rows)
        self.k = nn.Linear(source, feature_map.key_heads * feature_map.key_rows)

    def queries(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate(self.q(x).unflatten(-1, (-1, feature_map.rows)).transpose(1, 2))

    def keys(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate_keys(self.k(x).unflatten(-1, (-1, feature_map.key_rows)).transpose(1, 2))


class Mergeable(Recurrence):
    """A site that knows its projections, so that `t2r.merge` can fold the map into them."""

    scaling: float

    @property
    def merged(self) -> MergedProjections | None:
        """After a merge: features straight from the hidden states, beside the values' projection."""
        merged: Any = self._modules.get("merged_projections")
        return merged

    @property
    def merge_obstacle(self) -> str | None:
        """Why this site cannot be merged; None: it can."""
        return None

    def values(self, hidden_states: Tensor) -> Tensor:
        """`[batch, heads, time, head_dim]`: the values alone, after a merge."""
        raise NotImplementedError

    def query_key_projections(self) -> tuple[Affine, Affine]:
        """Weight `[heads * head_dim, hidden]` and bias of the queries' and the keys' projection."""
        raise NotImplementedError

    def drop_query_key_projections(self) -> None:
        """Keep the values' projection only."""
        raise NotImplementedError

    def attend_merged(self, x: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """Causal self attention from merged projections: `[batch, heads, time, head_dim]`."""
        assert self.merged is not None
        phi_q, phi_k = self.merged.queries(x, self.feature_map), self.merged.keys(x, self.feature_map)
        return self.advance(phi_q, phi_k, self.values(x), mask, layer)

    def become_merged(self) -> None:
        """Make room for merged projections, in place of those of queries and keys and of the map's own weights."""
        assert isinstance(self.feature_map, AffineMap)
        (q, _), (k, _) = self.query_key_projections()
        with torch.device(q.device):
            merged = MergedProjections(q.shape[1], k.shape[1], self.feature_map)
        self.merged_projections = merged.to(q.dtype).requires_grad_(False)
        self.drop_query_key_projections()
        self.feature_map.drop_affine()
