"""OLMo 2: queries and keys are normalized before they are rotated, the layers' outputs after."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("olmo2")
