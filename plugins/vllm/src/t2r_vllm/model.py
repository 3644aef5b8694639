"""The model class: vLLM's Transformers modelling backend, with recurrent layers."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.utils import WeightsMapper

from t2r.feature_maps import FeatureMap
from t2r_vllm.configuration import kept_layers
from t2r_vllm.layout import Heads, Layout, make_map
from t2r_vllm.site import PagedSite


class T2RForCausalLM(TransformersForCausalLM, HasInnerState, IsHybrid):
    """A swapped language model. vLLM builds the base model; its attention in recurrent layers is replaced."""

    is_hybrid = True

    @cached_property
    def _from_config_kwargs(self) -> dict[str, Any]:
        return {**super()._from_config_kwargs, "config": self.config.base_config}

    def _create_attention_instances(self, prefix: str = "") -> None:
        super()._create_attention_instances(prefix)
        recurrent = [layer for layer, kept in enumerate(kept_layers(self.config)) if not kept]
        for index, layer in enumerate(recurrent):
            name, fuser = self.attention_fusers[layer]
            self._make_recurrent(self.get_submodule(name), fuser, index)
        at = f".{VLLM_ATTN_ATTR}.feature_map."
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr={".feature_map.": at})

    def _make_recurrent(self, module: nn.Module, fuser: Any, index: int) -> None:
        """Replace vLLM's attention in a stock attention module by a recurrence."""
        layers = self.compilation_config.static_forward_context
        softmax = getattr(module, VLLM_ATTN_ATTR)
        prefix = next(name for name, layer in layers.items() if layer is softmax)
        rank, processes = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        heads = Heads.of(self.config, processes, rank)
        with torch.device(self.device_config.device):
            feature_map = make_map(self.config, heads, index).to(self.model_config.dtype)
        divide(feature_map, heads)
        scaling = fuser.scale(module)
        site = PagedSite(
            feature_map.eval().requires_grad_(False),
            heads.size**-0.5 if scaling is None else scaling,
            Layout.of(self.config, processes),
            prefix,
        )
        layers[prefix] = site
        setattr(module, VLLM_ATTN_ATTR, site)

    # --- What vLLM asks before there is a model -------------------------------------------------------------

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        return layout_of(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return layout_of(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return (get_temporal_copy_spec,)


def layout_of(vllm_config: Any) -> Layout:
    return Layout.of(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)


def divide(feature_map: FeatureMap, heads: Heads) -> None:
    """Let each parameter load the heads of this process from the saved one, whose first dimension are all heads.

    If there are fewer key heads than processes, several processes have the same one, as in vLLM's attention."""
    for parameter in feature_map.parameters():
        parameter.weight_loader = partial(load_heads, heads)  # type: ignore[attr-defined]


def load_heads(heads: Heads, own: Tensor, saved: Tensor) -> None:
    count, total = own.shape[0], saved.shape[0]
    first = heads.rank * total // heads.processes
    own.data.copy_(saved[first : first + count])
