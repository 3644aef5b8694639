"""The configuration of a t2r model as vLLM reads it, and what is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

import t2r.model.modeling  # noqa: F401  registers the Auto classes of t2r first
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.surgery.adapters import FAMILIES, family
from t2r_vllm.layout import layer_types, sites

ARCHITECTURE = "T2RForCausalLM"
"""The name of the model class, here and in the `architectures` of saved models."""
REFUSED = "T2RForSeq2SeqLM"
"""The name in saved encoder-decoders. vLLM must know it, so that it asks `Checks`."""


class ServedConfig(T2RConfig):
    """`T2RConfig` with the types of the layers, by which vLLM finds out that a model has states."""

    @property
    def layer_types(self) -> list[str]:
        try:
            refuse_model(self)
        except T2RError as error:
            # vLLM may read this before it asks `Checks`, which says why. There are the types of the base model, if any.
            raise AttributeError(str(error)) from error
        return layer_types(self)


class Checks(VerifyAndUpdateConfig):
    """What vLLM calls while it reads its options. Raises T2RError for what cannot be served."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        refuse_model(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        refuse_options(vllm_config)


def refuse_model(config: T2RConfig) -> None:
    """Raise T2RError if models with this configuration cannot be served by vLLM."""
    base: Any = config.base_config
    if base.is_encoder_decoder:
        raise refusal("is an encoder-decoder")
    if base.model_type not in FAMILIES:
        raise refusal(f"is of type {base.model_type!r}, for which t2r has no adapter")
    if family(base.model_type).recurrent is not None:
        raise refusal(f"is of type {base.model_type!r}, whose attention t2r computes in a module of its own")
    if config.get_text_config() is not base:
        raise refusal(f"is of type {base.model_type!r}, whose language model is part of a larger model")


def refusal(what: str) -> T2RError:
    return T2RError(f"vLLM cannot serve this model: it {what}; use `t2r serve`")


def refuse_options(vllm_config: Any) -> None:
    """Raise T2RError for options of vLLM that do not work with recurrent layers."""
    parallel = vllm_config.parallel_config
    if vllm_config.speculative_config is not None:
        raise T2RError("speculative decoding is not supported: a recurrent state cannot forget rejected tokens")
    if parallel.pipeline_parallel_size > 1:
        raise T2RError("pipeline parallelism is not supported with t2r models: use --tensor-parallel-size")
    if vllm_config.lora_config is not None:
        raise T2RError("adapters (LoRA) are not supported with t2r models: merge them into the weights first")
    sites(vllm_config.model_config.hf_config, parallel.tensor_parallel_size)  # refuses heads that cannot be divided
