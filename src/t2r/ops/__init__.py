"""Linear attention: tensors in, tensors out.

    out, state = linear_attention(phi_q, phi_k, v)              # a whole sequence, in parallel
    out, state = linear_attention(phi_q, phi_k, v, state=state) # its continuation
    out, state = step(phi_q, phi_k, v, state)                   # one more token, as an RNN

The three agree to rounding, for any split of the sequence. `contract` says what a backend implements and declares,
`registry` chooses one.
"""

from t2r.ops.common import FASTEST_DECAY, BoundCount, State, Sums, count_bounds, normalize
from t2r.ops.functional import absorb, linear_attention, look, step
from t2r.ops.registry import backends, choose

__all__ = [
    "FASTEST_DECAY",
    "BoundCount",
    "State",
    "Sums",
    "absorb",
    "backends",
    "choose",
    "count_bounds",
    "linear_attention",
    "look",
    "normalize",
    "step",
]
