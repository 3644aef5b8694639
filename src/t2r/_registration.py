"""Registration with transformers' Auto classes, at the moment they are imported and not before.

transformers takes seconds to import, and `import t2r` must not: if the Auto classes are loaded already we register
at once, otherwise right after whoever wants them has loaded them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO = "transformers.models.auto.modeling_auto"


def register_with_transformers() -> None:
    if AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    from t2r.modeling import register

    register()


class _AfterImport(MetaPathFinder):
    """Finds one module, as everybody else would, and has us called after it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:  # as if we had never been here
            module.__spec__.loader = self.loader
        _register()
