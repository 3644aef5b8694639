"""Benchmarks of speed and memory: `ops` for linear attention, the others for whole models."""

from t2r.bench import decoding, figures, memory, ops, training, translating

__all__ = ["decoding", "figures", "memory", "ops", "training", "translating"]
