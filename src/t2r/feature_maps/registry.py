"""Every feature map by name."""

from __future__ import annotations

import inspect
from typing import Any

from t2r.errors import T2RError
from t2r.feature_maps.base import FeatureMap
from t2r.feature_maps.elu import EluMap
from t2r.feature_maps.learned import HedgehogMap, T2RMap
from t2r.feature_maps.random import PerformerMap, RfaMap

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    cls.name: cls for cls in (T2RMap, EluMap, RfaMap, PerformerMap, HedgehogMap)
}


def feature_map_class(name: str) -> type[FeatureMap]:
    if name not in FEATURE_MAPS:
        raise T2RError(f"no feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def options_of(cls: type[FeatureMap]) -> list[str]:
    """The options a map adds to those of every map."""
    parameters = inspect.signature(cls).parameters.values()
    common = inspect.signature(FeatureMap).parameters
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in common]


def make_feature_map(name: str, **kwargs: Any) -> FeatureMap:
    """Build a feature map by name: the arguments of FeatureMap and the map's own options."""
    cls = feature_map_class(name)
    own, common = options_of(cls), inspect.signature(FeatureMap).parameters
    for key in kwargs:
        if key not in own and key not in common:
            raise T2RError(f"feature map {name!r} has no option {key!r}; it has: {', '.join(own) or 'none'}")
    return cls(**kwargs)
