"""Fewer kernels or operations in a decoding step, whose time is bound by their number."""

from t2r.generation.engine.fusion.fused import available, fused, shortened

__all__ = ["available", "fused", "shortened"]
