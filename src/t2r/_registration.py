"""Registration with transformers' Auto classes, at the moment they are imported and not before.

transformers takes seconds to import, and `import t2r` must not: if the Auto classes are loaded already we register
at once, otherwise right after whoever wants them has loaded them. `AutoConfig` may be wanted alone, and comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Modules that register themselves at their end: one of them may be what is being imported, and half of it there.


def _configurations() -> None:
    pass


def _models() -> None:
    import t2r.architectures.adaptive_lm.modeling  # noqa: F401
    from t2r.model.modeling import register

    register()


AUTO: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _configurations,
    "transformers.models.auto.modeling_auto": _models,
}


def register_with_transformers() -> None:
    for name, register in AUTO.items():
        if name in sys.modules:
            register()
        elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(name, register))


class _AfterImport(MetaPathFinder):
    """Finds one module, as everybody else would, and has us called after it has run."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self.name, self.register = name, register

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.register)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, register: Callable[[], None]) -> None:
        self.loader, self.register = loader, register

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:  # as if we had never been here
            module.__spec__.loader = self.loader
        self.register()
