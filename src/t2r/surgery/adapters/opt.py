"""OPT: BART's projections in a decoder without an encoder."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family

FAMILY = Family("opt", layers="decoder.layers", recurrent=BartRecurrence, positions="learned")
