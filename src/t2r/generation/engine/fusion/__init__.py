"""Fewer kernels in a captured decoding step, whose time is bound by their number."""

from t2r.generation.engine.fusion.fused import available, fused

__all__ = ["available", "fused"]
