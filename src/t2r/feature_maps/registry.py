"""The registry of feature maps."""

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
    """Return the class of a feature map by name. Raises T2RError if there is none."""
    if name not in FEATURE_MAPS:
        raise T2RError(f"unknown feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def options_of(cls: type[FeatureMap]) -> list[str]:
    """Return the names of the options that are specific to a map."""
    parameters = inspect.signature(cls).parameters.values()
    common = inspect.signature(FeatureMap).parameters
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in common]


def make_feature_map(name: str, **kwargs: Any) -> FeatureMap:
    """Create a feature map by name. Takes the arguments of FeatureMap and the options of the map."""
    cls = feature_map_class(name)
    own, common = options_of(cls), inspect.signature(FeatureMap).parameters
    for key in kwargs:
        if key not in own and key not in common:
            raise T2RError(f"feature map {name!r} has no option {key!r}; its options are: {', '.join(own) or 'none'}")
    return cls(**kwargs)
