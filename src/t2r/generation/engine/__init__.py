"""The generation engine."""

from t2r.generation.engine.engine import Engine, say_elsewhere
from t2r.generation.engine.request import ForGenerate
from t2r.generation.engine.sequences import Event, Sequence

__all__ = ["Engine", "Event", "ForGenerate", "Sequence", "say_elsewhere"]
