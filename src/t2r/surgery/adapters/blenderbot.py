"""Blenderbot: conversational BART with normalization before each layer."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family

FAMILY = Family(
    "blenderbot",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="learned",
    positions_by_row=True,
)
