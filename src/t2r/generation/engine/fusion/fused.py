"""A decoding step with fewer kernels for a capture, or with fewer operations for a recording.

Forwards of modules are replaced, and sums wait for the norms after them. Each replacement is compared with the module
first. Nothing stays on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from t2r.generation.engine.fusion.attention import fuse_attention
from t2r.generation.engine.fusion.layers import fuse_layers
from t2r.generation.engine.fusion.norms import fuse_norms, shorten_norms
from t2r.generation.engine.fusion.products import join_products
from t2r.generation.engine.fusion.replacing import Replacing
from t2r.generation.engine.fusion.rotation import skip_rotation
from t2r.generation.engine.fusion.sums import DeferredSums
from t2r.generation.engine.fusion.windows import fuse_windows
from t2r.ops.registry import BACKENDS


@contextmanager
def fused(model: nn.Module, cache: Any, step: Callable[[], None]) -> Iterator[None]:
    """Compute steps of the model on a static cache in fewer kernels, inside the `with` block and in this thread.

    On entry, `step` is run once, to see which layers read the same input."""
    sums = DeferredSums()
    with Replacing() as replacing:
        fuse_attention(model, cache, replacing)
        fuse_windows(model, replacing)
        join_products(model, replacing, step)
        fuse_layers(model, replacing)
        fuse_norms(model, replacing, sums)
        skip_rotation(model, replacing)
        with sums:
            yield


@contextmanager
def shortened(model: nn.Module, step: Callable[[], None]) -> Iterator[None]:
    """Compute steps of the model in fewer operations of PyTorch, as `fused` does with kernels."""
    with Replacing() as replacing:
        join_products(model, replacing, step)
        shorten_norms(model, replacing)
        yield


def available() -> bool:
    """Return whether Triton kernels run on this machine."""
    return BACKENDS["triton"].missing() is None
