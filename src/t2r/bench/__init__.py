"""Measurements of speed and memory: `bench.ops.run` of linear attention, `bench.decoding.run` of whole models."""

from t2r.bench import decoding, ops

__all__ = ["decoding", "ops"]
