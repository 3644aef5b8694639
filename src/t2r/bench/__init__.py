"""Benchmarks of speed and memory: `bench.ops.run` for linear attention, `bench.decoding.run` for whole models."""

from t2r.bench import decoding, figures, ops

__all__ = ["decoding", "figures", "ops"]
