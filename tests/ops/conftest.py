"""Without a GPU, Triton's kernels run in its interpreter. The switch is read when they are first imported."""

import importlib.util
import os

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
