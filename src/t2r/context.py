"""The context of the calls of a thread: what they compute beside what their arguments say.

The attention functions of transformers cannot be given everything through arguments, for example who observes them.
What is true of all calls inside a `with` block is set here, for one thread, so that a model can serve many threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

# Plain attributes of a plain `threading.local`: torch.compile can read these.
_thread = threading.local()

Name = Literal["constants", "mode", "observer"]
"""What a context has: values that depend only on weights (`ops.constants`), the sites that compute exact attention
(`attention.recurrence`), and who observes attention (`attention.observation`)."""


def current(name: Name) -> Any:
    """Return what was set in this thread, or None."""
    return getattr(_thread, name, None)


@contextmanager
def within(**values: Any) -> Iterator[None]:
    """Set values inside the `with` block, in this thread."""
    before = {name: getattr(_thread, name, None) for name in values}
    for name, value in values.items():
        setattr(_thread, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_thread, name, value)
