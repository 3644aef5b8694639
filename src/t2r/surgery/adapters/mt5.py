"""mT5: multilingual T5 with gated feed-forward layers."""

from t2r.surgery.adapters.t5 import T5Recurrence, t5_like

FAMILY = t5_like("mt5", T5Recurrence)
