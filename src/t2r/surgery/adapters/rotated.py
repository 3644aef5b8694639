"""Rotary positions without the attention interface of transformers (GPT-J, Falcon).

Projections and rotation are computed here, and the feature map is applied to the rotated queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.cache import adopt
from t2r.attention.projection import ProjectionAttention
from t2r.attention.recurrence import Inputs
from t2r.feature_maps import join_heads
from t2r.surgery.adapters.base import Family, Site, change_class


class RotatedAttention(ProjectionAttention):
    """Self attention that rotates queries and keys by position between the projections and the feature map."""

    head_dim: int
    rotary: bool = True
    """Whether the feature map is applied to rotated queries and keys. Exact attention always uses rotation."""

    merge_obstacle = (
        "its queries and keys are rotated by position or normalized between the projections and the feature map"
    )

    @property
    def scaling(self) -> float:  # type: ignore[override]
        return self.head_dim**-0.5

    def rotate(self, q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys as the stock module does. `positions` is what its forward receives."""
        raise NotImplementedError

    def attend_rotated(self, x: Tensor, mask: Tensor | None, cache: Any, positions: Any) -> Tensor:
        """Compute the output of the module, `[batch, time, hidden]`, before residual dropout."""
        layer = adopt(cache, self.layer_idx, None if self.exact else self.make_layer)
        q, k, v = self.project(x)
        if self.exact:
            out = self.rotated_exactly(q, k, v, mask, layer, positions)
        else:
            if self.rotary:
                q, k = self.rotate(q, k, positions)
            out = self.attend(Inputs(q, k, v, mask, self.scaling, hidden_states=x), layer)
        return self.output(join_heads(out))

    def rotated_exactly(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: Any, positions: Any
    ) -> Tensor:
        rotated_q, rotated_k = self.rotate(q, k, positions)
        if layer is not None:
            rotated_k, v = layer.update(rotated_k, v)
        return self.attend_exactly(rotated_q, rotated_k, v, mask, True, mapped=None if self.rotary else (q, k))


class RotatedFamily(Family):
    def softmax_dropout(self, module: Any) -> float:
        """Return the attention dropout of the stock module."""
        return 0.0

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        # The stock attention requires a 4-D mask, which a swapped model does not create.
        for site in kept:
            module: Any = site.module
            change_class(module, self.recurrent_class(module))
            module.keep_softmax(self.softmax_dropout(module))
