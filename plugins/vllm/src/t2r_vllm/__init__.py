"""t2r models in vLLM: vLLM loads this package by its entry point and calls `register` in each of its processes."""

from __future__ import annotations

__version__ = "0.1.0.dev0"

VERSIONS = ("0.32.0",)
"""The versions of vLLM that this package was tested with."""


def register() -> None:
    """Register the configuration and the model class of t2r with vLLM. Does nothing if it was called before."""
    import vllm

    from t2r.errors import T2RError

    if (installed := vllm.__version__.partition("+")[0]) not in VERSIONS:
        raise T2RError(
            f"t2r-vllm {__version__} was tested with vLLM {', '.join(VERSIONS)} only, and {installed} is installed: "
            "install one of these, or a newer t2r-vllm"
        )
    # Not before: in another version these names may not exist.
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from t2r_vllm.configuration import ARCHITECTURE, REFUSED, Checks, ServedConfig
    from t2r_vllm.site import OPERATOR

    AutoConfig.register("t2r", ServedConfig, exist_ok=True)
    # Where vLLM captures a part of a model as a CUDA graph, attention is left out, and so is this operator.
    if OPERATOR not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OPERATOR)
    for name in (ARCHITECTURE, REFUSED):
        MODELS_CONFIG_MAP[name] = Checks
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"t2r_vllm.model:{ARCHITECTURE}")
