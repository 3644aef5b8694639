"""Evaluation of models: perplexity, repetition, recall, lm-eval tasks, and BLEU of translations.

`evaluate` runs all measurements for several models and texts. Each measurement is also available as a function.
"""

from t2r.evaluation.compare import evaluate
from t2r.evaluation.generation import recall, repetition
from t2r.evaluation.harness import find_tasks, harness
from t2r.evaluation.inputs import Text, encode, read_text
from t2r.evaluation.logits import logits_by_slice
from t2r.evaluation.overview import tables
from t2r.evaluation.perplexity import Perplexity, perplexity
from t2r.evaluation.translation import evaluate_translation, score, token_scores
from t2r.evaluation.variants import Variant

__all__ = [
    "Perplexity",
    "Text",
    "Variant",
    "encode",
    "evaluate",
    "evaluate_translation",
    "find_tasks",
    "harness",
    "logits_by_slice",
    "perplexity",
    "read_text",
    "recall",
    "repetition",
    "score",
    "tables",
    "token_scores",
]
