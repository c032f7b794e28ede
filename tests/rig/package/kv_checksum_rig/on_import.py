"""Run a function right after a module is imported, or at once if it already was."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _HookedLoader(importlib.abc.Loader):
    """Delegates to the real loader, then calls the hook."""

    def __init__(self, real: importlib.abc.Loader, hook: Hook) -> None:
        self._real = real
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader would."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then let the hook change it."""
        self._real.exec_module(module)
        self._hook(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


class _HookFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that have a hook, through the finders that follow it."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}
        self._searching: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with the loader wrapped."""
        if fullname not in self.hooks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, self.hooks[fullname])
        return spec


_finder = _HookFinder()


def on_import(name: str, hook: Hook) -> None:
    """Call ``hook`` with module ``name`` once it is imported."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _finder.hooks[name] = hook
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
