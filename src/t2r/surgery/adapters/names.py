"""The model types with an adapter, and the error for models that cannot be swapped."""

from __future__ import annotations

from t2r.errors import T2RError

# Model types. Each is a row of plain.py, or a module of the same name in this package, which defines FAMILY.
FAMILIES = (
    "adaptive_lm",
    "bart",
    "blenderbot",
    "blenderbot-small",
    "falcon",
    "fsmt",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
    "m2m_100",
    "marian",
    "mbart",
    "mistral",
    "mt5",
    "olmo",
    "olmo2",
    "opt",
    "pegasus",
    "phi",
    "phi3",
    "plbart",
    "qwen2",
    "qwen3",
    "stablelm",
    "t5",
    "umt5",
)


def refusal(model_type: str, reason: str) -> T2RError:
    """Return the error for a model that cannot be swapped."""
    return T2RError(
        f"models of type {model_type!r} cannot be swapped: {reason}; t2r has tested {len(FAMILIES)} types, such as "
        "gpt2, llama and marian (docs/models.md)"
    )
