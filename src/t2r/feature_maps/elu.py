"""The feature map of Katharopoulos et al. (2020), which has no parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from t2r.errors import T2RError
from t2r.feature_maps.base import FeatureMap
from t2r.feature_maps.tensors import repeat_heads


class EluMap(FeatureMap):
    """elu(x) + 1. It has no parameters, so `shared` has no effect. The feature size is the head size."""

    name = "elu"

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.finish()

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return head_dim

    @classmethod
    def check(cls, head_dim: int, feature_size: int | None) -> None:
        super().check(head_dim, feature_size)
        if feature_size not in (None, head_dim):
            raise T2RError(
                f"feature map 'elu' has as many features as the head size: feature_size must be {head_dim} "
                f"(or left out); got {feature_size}"
            )

    def queries(self, q: Tensor) -> Tensor:
        # Computed without F.elu, because its -1 cancels the +1: in bfloat16, elu(-6) + 1 is 0 but exp(-6) is not.
        return (q.relu() + q.clamp_max(0).exp()).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return repeat_heads(self.queries(k), self.key_heads)
