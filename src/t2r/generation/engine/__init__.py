"""The generation engine."""

from t2r.generation.engine.engine import Engine, engine_for
from t2r.generation.engine.request import ForGenerate
from t2r.generation.engine.sequences import Event, Sequence

__all__ = ["Engine", "Event", "ForGenerate", "Sequence", "engine_for"]
