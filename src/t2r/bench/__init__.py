"""Measurements of speed and memory: `bench.ops.run` of linear attention, `bench.decoding.run` of whole models."""

from t2r.bench import decoding, figures, ops

__all__ = ["decoding", "figures", "ops"]
