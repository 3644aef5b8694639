"""Measurements of speed and memory: `ops` of linear attention, `decoding` and `training` of whole models."""

from t2r.bench import decoding, figures, ops, training

__all__ = ["decoding", "figures", "ops", "training"]
