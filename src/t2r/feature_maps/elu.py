"""The map of Katharopoulos et al. (2020), which has nothing to learn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from t2r.errors import T2RError
from t2r.feature_maps.base import FeatureMap
from t2r.feature_maps.tensors import repeat_heads


class EluMap(FeatureMap):
    """elu(x) + 1: no parameters (so nothing to share or to separate), and as many features as dimensions."""

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
                f"feature map 'elu' has as many features as the head has dimensions: feature_size must be "
                f"{head_dim} (or left out); got {feature_size}"
            )

    def queries(self, q: Tensor) -> Tensor:
        # Written without elu, whose -1 would cancel the +1: in bfloat16 elu(-6) + 1 is 0, and exp(-6) is not.
        return (q.relu() + q.clamp_max(0).exp()).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return repeat_heads(self.queries(k), self.key_heads)
