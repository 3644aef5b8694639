"""Triton kernels for linear attention on a GPU. The triton package is imported on the first call."""

from t2r.ops.triton.backend import Triton

__all__ = ["Triton"]
