"""Turn a pretrained transformer into an RNN.

After `import t2r`, the Auto classes of transformers load models saved by t2r. Public names are imported on first use,
so that `t2r --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from t2r._registration import is_command_line, register
from t2r._version import __version__

# The public API: each name and its location, as "module" or "module:attribute".
_EXPORTS = {
    "Engine": "t2r.generation.engine:Engine",
    "T2RCache": "t2r.attention.cache:T2RCache",
    "T2RConfig": "t2r.config:T2RConfig",
    "T2RError": "t2r.errors:T2RError",
    "T2RForCausalLM": "t2r.model.modeling:T2RForCausalLM",
    "T2RForSeq2SeqLM": "t2r.model.modeling:T2RForSeq2SeqLM",
    "SwappedModel": "t2r.model.swapped:SwappedModel",
    "analyze": "t2r.analysis.analyze:analyze",
    "average": "t2r.pipelines.average:average",
    "bench": "t2r.bench",
    "convert": "t2r.pipelines.convert:convert",
    "evaluate": "t2r.evaluation.compare:evaluate",
    "exact_attention": "t2r.attention.recurrence:exact_attention",
    "feature_maps": "t2r.feature_maps",
    "generate": "t2r.generation.text:generate",
    "inspect": "t2r.reporting.inspection:inspect_model",
    "load": "t2r.hub:load",
    "load_tokenizer": "t2r.hub:load_tokenizer",
    "merge": "t2r.model.merge:merge",
    "ops": "t2r.ops",
    "pretrain": "t2r.pipelines.pretrain:pretrain",
    "read_document": "t2r.generation.state:read_document",
    "report": "t2r.pages.report:report",
    "reporting": "t2r.reporting",
    "swap": "t2r.model.swap:swap",
    "teach": "t2r.pipelines.teach:teach",
}

__all__ = [
    "Engine",
    "SwappedModel",
    "T2RCache",
    "T2RConfig",
    "T2RError",
    "T2RForCausalLM",
    "T2RForSeq2SeqLM",
    "__version__",
    "analyze",
    "average",
    "bench",
    "convert",
    "evaluate",
    "exact_attention",
    "feature_maps",
    "generate",
    "inspect",
    "load",
    "load_tokenizer",
    "merge",
    "ops",
    "pretrain",
    "read_document",
    "report",
    "reporting",
    "swap",
    "teach",
]

if TYPE_CHECKING:
    from t2r import bench, feature_maps, ops, reporting
    from t2r.analysis.analyze import analyze
    from t2r.attention.cache import T2RCache
    from t2r.attention.recurrence import exact_attention
    from t2r.config import T2RConfig
    from t2r.errors import T2RError
    from t2r.evaluation.compare import evaluate
    from t2r.generation.engine import Engine
    from t2r.generation.state import read_document
    from t2r.generation.text import generate
    from t2r.hub import load, load_tokenizer
    from t2r.model.merge import merge
    from t2r.model.modeling import T2RForCausalLM, T2RForSeq2SeqLM
    from t2r.model.swap import swap
    from t2r.model.swapped import SwappedModel
    from t2r.pages.report import report
    from t2r.pipelines.average import average
    from t2r.pipelines.convert import convert
    from t2r.pipelines.pretrain import pretrain
    from t2r.pipelines.teach import teach
    from t2r.reporting.inspection import inspect_model as inspect
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
