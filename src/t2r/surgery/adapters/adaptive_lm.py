"""The language model of the paper (adaptive LM, Baevski and Auli): BART's projections, sinusoidal positions."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family

FAMILY = Family(
    "adaptive_lm",
    recurrent=BartRecurrence,
    positions="sinusoidal",
    lacks=frozenset({"resizing its embeddings"}),
)
