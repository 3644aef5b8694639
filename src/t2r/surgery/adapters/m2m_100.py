"""M2M100 and NLLB: sinusoidal positions, computed as needed."""

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family

FAMILY = Family(
    "m2m_100",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="sinusoidal",
)
