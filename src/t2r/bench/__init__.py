"""Benchmarks of speed and memory: `ops` for linear attention, `decoding` and `training` for whole models."""

from t2r.bench import decoding, figures, ops, training

__all__ = ["decoding", "figures", "ops", "training"]
