"""Feature maps: what stands in for the exponential when a head becomes an RNN.

Softmax attention compares a query with a key by `exp(q·k)`; a recurrent head compares them by `φ(q)·φ(k)`,
which lets the sum over keys be taken before the query is known. A feature map is φ for all the heads of one
layer at once: one tensor of weights per layer, and never a loop over heads.

    t2r        relu(W x + b), learned (Kasai et al. 2021): the paper's own
    elu        elu(x) + 1 (Katharopoulos et al. 2020)
    rfa        random features of the Gaussian kernel (Peng et al. 2021)
    performer  positive orthogonal random features of the exponential (Choromanski et al. 2021)
    hedgehog   softmax over [W x, -W x], learned (Zhang et al. 2024)

Queries arrive multiplied by `1/sqrt(head_dim)`. `feature_size` is always the size of φ(x), the rows of the
state. With grouped-query attention a map belongs to a key/value head and the queries of its group use it too;
un-grouped, there is a key map, and so a state, per query head. With `decay` every feature forgets, at a rate of its
own that is learned: what softmax attention tells from positions (what was said just now, or long ago) is then told
by how much of it is left. With `key_weights` a learned map also says how much each key counts, whoever asks.

To add a map: one class in a file of this folder, and its name in the tuple in `registry.py`.
"""

from t2r.feature_maps.base import AffineMap, FeatureMap
from t2r.feature_maps.elu import EluMap
from t2r.feature_maps.learned import ACTIVATIONS, HedgehogMap, T2RMap
from t2r.feature_maps.random import PerformerMap, RfaMap
from t2r.feature_maps.registry import FEATURE_MAPS, feature_map_class, make_feature_map
from t2r.feature_maps.tensors import affine, identity_like, orthogonal_rows, repeat_heads, safe_norm

__all__ = [
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "AffineMap",
    "EluMap",
    "FeatureMap",
    "HedgehogMap",
    "PerformerMap",
    "RfaMap",
    "T2RMap",
    "affine",
    "feature_map_class",
    "identity_like",
    "make_feature_map",
    "orthogonal_rows",
    "repeat_heads",
    "safe_norm",
]
