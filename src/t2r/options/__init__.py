"""Options. Each has one definition of its type, default, range or choices, and help.

A group of options is a dataclass whose fields are made by `option`. Configurations, the command line, the signatures of
`t2r.convert` and `t2r.pretrain`, and the tables in docs/recipes.md are derived from these fields, and `check` validates
them. This package does not import torch, because `t2r --help` imports it.
"""

from t2r.options.definition import Option, check, option, options_of, parse_auto, refuse_unknown
from t2r.options.groups import (
    BOTH,
    CAUSAL,
    CROSS,
    AnalysisOptions,
    GenerationOptions,
    RunOptions,
    SwapOptions,
    TeachingOptions,
)
from t2r.options.training import Conversion, Pretraining, Sources

__all__ = [
    "BOTH",
    "CAUSAL",
    "CROSS",
    "AnalysisOptions",
    "Conversion",
    "GenerationOptions",
    "Option",
    "Pretraining",
    "RunOptions",
    "Sources",
    "SwapOptions",
    "TeachingOptions",
    "check",
    "option",
    "options_of",
    "parse_auto",
    "refuse_unknown",
]
