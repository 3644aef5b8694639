"""Pegasus: BART with sinusoidal positions and normalization before each layer."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.marian import SinusoidalTableFamily

FAMILY = SinusoidalTableFamily(
    "pegasus",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="sinusoidal",
    positions_by_row=True,
)
