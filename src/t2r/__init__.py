"""Turn a pretrained transformer into an RNN.

After `import t2r`, transformers' Auto classes load what t2r has saved. Each public name is imported when it is first
used, so that `t2r --help` answers without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from t2r._registration import is_command_line, register

__version__ = "0.1.0.dev0"

# The public API: a name, and where it lives, as "module" or "module:attribute".
_EXPORTS = {
    "T2RCache": "t2r.attention.cache:T2RCache",
    "T2RConfig": "t2r.config:T2RConfig",
    "T2RError": "t2r.errors:T2RError",
    "T2RForCausalLM": "t2r.model.modeling:T2RForCausalLM",
    "T2RForSeq2SeqLM": "t2r.model.modeling:T2RForSeq2SeqLM",
    "convert": "t2r.pipelines.convert:convert",
    "exact_attention": "t2r.attention.recurrence:exact_attention",
    "feature_maps": "t2r.feature_maps",
    "merge": "t2r.model.merge:merge",
    "ops": "t2r.ops",
    "pretrain": "t2r.pipelines.pretrain:pretrain",
    "swap": "t2r.model.swap:swap",
}

__all__ = [
    "T2RCache",
    "T2RConfig",
    "T2RError",
    "T2RForCausalLM",
    "T2RForSeq2SeqLM",
    "__version__",
    "convert",
    "exact_attention",
    "feature_maps",
    "merge",
    "ops",
    "pretrain",
    "swap",
]

if TYPE_CHECKING:
    from t2r import feature_maps, ops
    from t2r.attention.cache import T2RCache
    from t2r.attention.recurrence import exact_attention
    from t2r.config import T2RConfig
    from t2r.errors import T2RError
    from t2r.model.merge import merge
    from t2r.model.modeling import T2RForCausalLM, T2RForSeq2SeqLM
    from t2r.model.swap import swap
    from t2r.pipelines.convert import convert
    from t2r.pipelines.pretrain import pretrain
else:

    def __getattr__(name: str) -> object:
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _EXPORTS[name].partition(":")
        value = import_module(module)
        if attribute:
            value = getattr(value, attribute)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


if not is_command_line():
    register()
