"""The registry of backends, and backend selection."""

from __future__ import annotations

import torch

from t2r.errors import T2RError
from t2r.ops import reference
from t2r.ops.contract import Backend, Request
from t2r.ops.torch_backends import Chunked, Reference
from t2r.ops.triton import Triton

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Reference("quadratic", reference.quadratic),
        Reference("recurrent", reference.recurrent),
        Chunked(),
        Triton(),
    )
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("triton",)}
"""Backends that `auto` tries first, by device type. If none fits, it uses FALLBACK."""
FALLBACK = "chunked"
"""It supports every call except a step that computes features."""


def backends() -> dict[str, str | None]:
    """Return all backends by name. The value is None if the backend is available, otherwise the reason why not."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def select(request: Request, name: str = "auto") -> Backend:
    """Return the backend for a request.

    Raises:
        T2RError: the named backend does not exist, is not available here, or does not support the request.
    """
    if name == "auto":
        if (preferred := prefer(request)) is not None:
            return preferred
        if not request.features:  # supports everything else
            return BACKENDS[FALLBACK]
        name = FALLBACK
    if name not in BACKENDS:
        raise T2RError(f"unknown backend {name!r}: choose auto or one of {', '.join(BACKENDS)}")
    if (reason := BACKENDS[name].missing()) is not None:
        raise T2RError(f"backend {name!r} is not available: {reason}")
    if (lack := BACKENDS[name].abilities.lacks(request)) is not None:
        raise T2RError(f"backend {name!r} does not support {lack}: choose another backend, or auto")
    return BACKENDS[name]


def prefer(request: Request, preference: tuple[str, ...] | None = None) -> Backend | None:
    """Return the first backend of `preference` (default: that of the device) that supports the request, or None."""
    for name in PREFERENCE.get(request.device, ()) if preference is None else preference:
        backend = BACKENDS[name]
        if backend.abilities.lacks(request) is None and backend.missing() is None:
            return backend
    return None


def choose(
    device: torch.device,
    causal: bool = True,
    *,
    dtype: torch.dtype = torch.float32,
    feature: int = 64,
    value: int = 64,
    decay: bool = False,
    signed: bool = False,
    gradients: bool = False,
) -> str:
    """Return the name of the backend that `auto` selects for a sequence on this device."""
    request = Request(
        device=device.type,
        dtypes=(dtype,),
        feature=feature,
        value=value,
        decay=decay,
        signed=signed,
        causal=causal,
        gradients=gradients,
    )
    return select(request).name
