"""Whether triton is installed, and whether it interprets its kernels. This module does not import triton."""

from __future__ import annotations

import importlib.util
import os

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels slowly on a CPU, for tests. Triton reads the variable when kernels are defined."""
