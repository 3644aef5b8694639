"""Whether triton is there, and how it runs. This file does not import it."""

from __future__ import annotations

import importlib.util
import os

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on a CPU, slowly: for tests. Triton reads the variable when kernels are defined."""
