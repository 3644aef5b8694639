"""Linear attention on tensors.

    out, state = linear_attention(phi_q, phi_k, v)              # a whole sequence, in parallel
    out, state = linear_attention(phi_q, phi_k, v, state=state) # continue from a state
    out, state = step(phi_q, phi_k, v, state)                   # one token, as an RNN

The three agree up to rounding, however the sequence is split. `contract` defines the backend interface and `registry`
selects a backend.
"""

from t2r.ops.common import (
    FASTEST_DECAY,
    LARGEST_LOG_WEIGHT,
    Beside,
    Features,
    Slots,
    State,
    Sums,
    Windows,
    combine,
    normalize,
)
from t2r.ops.functional import absorb, computes_features, linear_attention, look, step
from t2r.ops.registry import backends, choose
from t2r.ops.rounding import Draws
from t2r.ops.rules import Rule, Sum
from t2r.ops.soft_windows import soft_window_attention
from t2r.ops.weights import attention_weights
from t2r.ops.windows import Far, window_attention

__all__ = [
    "FASTEST_DECAY",
    "LARGEST_LOG_WEIGHT",
    "Beside",
    "Draws",
    "Far",
    "Features",
    "Rule",
    "Slots",
    "State",
    "Sum",
    "Sums",
    "Windows",
    "absorb",
    "attention_weights",
    "backends",
    "choose",
    "combine",
    "computes_features",
    "linear_attention",
    "look",
    "normalize",
    "soft_window_attention",
    "step",
    "window_attention",
]
