"""Triton kernels for linear attention on a GPU. Triton itself is imported by the first call, not before."""

from t2r.ops.triton.backend import Triton

__all__ = ["Triton"]
