"""The model class: vLLM's Transformers modeling backend, with recurrent layers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.utils import WeightsMapper

from t2r_vllm.layout import Layout, Site, sites
from t2r_vllm.projections import become_merged, divide, unrotated
from t2r_vllm.site import PagedSite


class T2RForCausalLM(TransformersForCausalLM, HasInnerState, IsHybrid):
    """A swapped language model. vLLM builds the base model; its attention in recurrent layers is replaced."""

    is_hybrid = True

    @cached_property
    def _from_config_kwargs(self) -> dict[str, Any]:
        return {**super()._from_config_kwargs, "config": self.config.base_config}

    def _create_attention_instances(self, prefix: str = "") -> None:
        super()._create_attention_instances(prefix)
        rank, processes = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        with torch.device(self.device_config.device):
            for layer, site in sites(self.config, processes, rank).items():
                name, fuser = self.attention_fusers[layer]
                self._replace_attention(name, fuser.scale(self.get_submodule(name)), site)
        at = f".{VLLM_ATTN_ATTR}.feature_map."
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_substr={".feature_map.": at})

    def _replace_attention(self, name: str, scaling: float | None, site: Site) -> None:
        """Replace vLLM's attention in a stock attention module: by one with a sliding window, or by a recurrence."""
        module, layers = self.get_submodule(name), self.compilation_config.static_forward_context
        prefix = next(key for key, layer in layers.items() if layer is getattr(module, VLLM_ATTN_ATTR))
        del layers[prefix]
        scaling = site.heads.size**-0.5 if scaling is None else scaling
        softcap = getattr(self.text_config, "attn_logit_softcapping", None)
        if site.sliding is not None:
            attention: nn.Module = Attention(
                num_heads=site.heads.queries,
                head_size=site.heads.size,
                scale=scaling,
                num_kv_heads=site.heads.keys,
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                logits_soft_cap=softcap,
                per_layer_sliding_window=site.sliding,
                prefix=prefix,
            )
        else:
            dtype, merged = self.model_config.dtype, self.config.merged
            if (feature_map := site.make_map(self.config)) is not None:
                feature_map = feature_map.to(dtype).eval().requires_grad_(False)
                divide(feature_map, site)
            else:  # all heads with states may be those of another process
                self.ignore_unexpected_prefixes.append(f"{name}.{VLLM_ATTN_ATTR}.feature_map.")
            layout = Layout.of(self.config, site.heads.processes, dtype)
            attention = PagedSite(site, feature_map, scaling, layout, prefix, softcap, merged)
            attention.follow(torch.get_default_device())
            layers[prefix] = attention
        setattr(module, VLLM_ATTN_ATTR, attention)
        if self.config.merged:
            become_merged(self, name, site)
        elif not self.config.rotary:
            module.register_forward_pre_hook(unrotated, with_kwargs=True)

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
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return Layout.of(model.hf_config, parallel.tensor_parallel_size, model.dtype)
