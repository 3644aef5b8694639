"""Models of our own: those of the paper that transformers does not have, as ordinary Hugging Face models.

They know nothing of recurrence: what makes one of them an RNN is its adapter, as with everybody else's. To import
one makes the Auto classes know it. Each is imported at its first use, since a configuration is wanted without models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t2r.architectures.adaptive_lm.configuration import AdaptiveLMConfig
    from t2r.architectures.adaptive_lm.modeling import AdaptiveLMForCausalLM, AdaptiveLMModel

__all__ = ["AdaptiveLMConfig", "AdaptiveLMForCausalLM", "AdaptiveLMModel"]

_MODULES = {
    "AdaptiveLMConfig": "adaptive_lm.configuration",
    "AdaptiveLMForCausalLM": "adaptive_lm.modeling",
    "AdaptiveLMModel": "adaptive_lm.modeling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
