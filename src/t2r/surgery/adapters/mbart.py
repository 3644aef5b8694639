"""mBART: multilingual BART with normalization before each layer."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family

FAMILY = Family(
    "mbart",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="learned",
)
