"""The configuration of a t2r model as vLLM reads it, and what is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

import t2r.model.modeling  # noqa: F401  registers the Auto classes of t2r first
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.surgery.adapters import FAMILIES, family

ARCHITECTURE = "T2RForCausalLM"
"""The name of the model class, here and in the `architectures` of saved models."""


class ServedConfig(T2RConfig):
    """`T2RConfig` with the types of the layers, by which vLLM finds out that a model has states."""

    @property
    def layer_types(self) -> list[str]:
        return ["full_attention" if kept else "linear_attention" for kept in kept_layers(self)]


def kept_layers(config: Any) -> list[bool]:
    """Return for each layer whether it keeps softmax attention."""
    count = config.get_text_config().num_hidden_layers
    kept = config.kept_layers(count)
    return [layer in kept for layer in range(count)]


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
        raise refusal("an encoder-decoder")
    if base.model_type not in FAMILIES:
        raise refusal(f"of type {base.model_type!r}, which t2r has no adapter for")
    if family(base.model_type).recurrent is not None:
        raise refusal(f"of type {base.model_type!r}, whose attention has projections of its own")
    if config.get_text_config() is not base:
        raise refusal(f"of type {base.model_type!r}, whose language model is part of a larger model")
    if config.plan is not None:
        raise refusal("with a memory plan")
    if config.merged:
        raise refusal("that is merged", "serve the model that it was merged from")
    if not config.rotary:
        raise refusal("with rotary=False")


def refusal(what: str, remedy: str = "use `t2r serve`") -> T2RError:
    return T2RError(f"this is a model {what}, which vLLM cannot serve: {remedy}")


def refuse_options(vllm_config: Any) -> None:
    """Raise T2RError for options of vLLM that do not work with recurrent layers."""
    if vllm_config.speculative_config is not None:
        raise T2RError("speculative decoding is not supported: a recurrent state cannot forget rejected tokens")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise T2RError("pipeline parallelism is not supported with t2r models: use --tensor-parallel-size")
