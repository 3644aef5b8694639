"""Feature maps, which replace the exponential of softmax attention.

Softmax attention weighs a key by `exp(q·k)`. A recurrent head weighs it by `φ(q)·φ(k)`, so that the sum over keys can
be computed before the query is known. A feature map implements φ for all heads of a layer, with one weight tensor and
no loop over heads.

    t2r        relu(W x + b), learned (Kasai et al. 2021), the map of the paper
    elu        elu(x) + 1 (Katharopoulos et al. 2020)
    rfa        random features of the Gaussian kernel (Peng et al. 2021)
    performer  positive orthogonal random features of the exponential (Choromanski et al. 2021)
    hedgehog   softmax over [W x, -W x], learned (Zhang et al. 2024)

Queries are already multiplied by `1/sqrt(head_dim)`. `feature_size` is the size of φ(x), which is the number of rows of
the state. With grouped-query attention, there is one map per key/value head, shared by the queries of its group. With
`grouped=False`, there is one key map, and therefore one state, per query head. With `decay`, each feature has a learned
decay rate, which distinguishes recent from distant tokens as positions do in softmax attention. With `key_weights`, a
learned map also gives each key a query-independent weight.

To add a map, add a class in this folder and list it in `registry.py`.
"""

from t2r.feature_maps.base import AffineMap, FeatureMap
from t2r.feature_maps.elu import EluMap
from t2r.feature_maps.learned import ACTIVATIONS, HedgehogMap, T2RMap
from t2r.feature_maps.random import PerformerMap, RfaMap
from t2r.feature_maps.registry import FEATURE_MAPS, feature_map_class, make_feature_map
from t2r.feature_maps.tensors import (
    affine,
    identity_like,
    join_heads,
    orthogonal_rows,
    repeat_heads,
    safe_norm,
    split_heads,
)

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
    "join_heads",
    "make_feature_map",
    "orthogonal_rows",
    "repeat_heads",
    "safe_norm",
    "split_heads",
]
