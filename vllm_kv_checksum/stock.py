"""Read vLLM's own sources, from a tree or out of a wheel, and the names they define."""

import ast
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .apply import FEATURE, InstallError, find_package, read_manifest, read_version
from .wheel import open_base

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PACKAGE = "vllm."


@dataclass
class Stock:
    """A vLLM that nothing was applied to.

    Attributes:
        place: where it was found, for people.
        version: as its metadata has it.
        read: returns a file below the ``vllm`` package, or None if there is none.

    """

    place: str
    version: str
    read: Callable[[str], bytes | None]
    _paths: dict[str, str | None] = field(default_factory=dict)
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def tree(self, path: str) -> ast.Module | None:
        """Return a module's syntax tree, or None if `why_unreadable` says why."""
        if path not in self._trees:
            data = self.read(path)
            try:
                self._trees[path] = None if data is None else ast.parse(data)
            except (SyntaxError, ValueError):
                self._trees[path] = None
        return self._trees[path]

    def why_unreadable(self, path: str) -> str:
        """Return why a file has no syntax tree; empty if it has one."""
        if self.tree(path) is not None:
            return ""
        if self.read(path) is None:
            return "the file is missing"
        return "this Python cannot read the file"

    def path_of(self, module: str) -> str | None:
        """Return the file of a module of vLLM, given by its dotted name."""
        if module not in self._paths:
            base = module.removeprefix(_PACKAGE).replace(".", "/")
            paths = [f"{base}.py", f"{base}/__init__.py"]
            if module == "vllm":
                paths = ["__init__.py"]
            found = (p for p in paths if self.read(p) is not None)
            self._paths[module] = next(found, None)
        return self._paths[module]

    def has(self, module: str, name: str) -> bool:
        """Return whether ``from module import name`` finds the name."""
        path = self.path_of(module)
        tree = None if path is None else self.tree(path)
        if tree is None:
            return False
        names = bound_in(tree)
        if name in names or self.path_of(f"{module}.{name}") is not None:
            return True
        # Modules that look names up when they are asked keep them as strings.
        lazy = "__getattr__" in names
        return lazy and any(
            isinstance(node, ast.Constant) and node.value == name
            for node in ast.walk(tree)
        )

    def members(self, path: str, name: str) -> set[str]:
        """Return the attributes of a class and of its bases in vLLM."""
        tree = self.tree(path)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                own = bound_in(node) | set(stored_in_self(node))
                bases = [self.members(path, n) for n in map(_base_name, node.bases)]
                return own.union(*bases)
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    module = self.path_of(node.module or "")
                    if (alias.asname or alias.name) == name and module is not None:
                        return self.members(module, alias.name)
        return set()


@contextmanager
def open_stock(tree: Path | None, wheel: Path | None) -> Iterator[Stock]:
    """Open the wheel, if one is given, or else a tree: the installed vLLM by default.

    Raises:
        InstallError: there is no vLLM, or the series is in it.

    """
    if wheel is None:
        yield _stock_in(find_package(tree))
        return
    try:
        with zipfile.ZipFile(wheel) as archive:
            base = open_base(wheel, archive)
            files = set(archive.namelist())

            def read(path: str) -> bytes | None:
                name = f"vllm/{path}"
                return archive.read(name) if name in files else None

            yield Stock(str(wheel), base.version, read)
    except (zipfile.BadZipFile, EOFError) as error:
        raise InstallError(f"{wheel} is not an intact wheel: {error}") from None
    except OSError as error:
        raise InstallError(f"{wheel}: {error.strerror or error}") from None


def _stock_in(package: Path) -> Stock:
    if read_manifest(package) is not None or (package / FEATURE).exists():
        raise InstallError(
            f"the series is applied to the vLLM in {package}, and check judges vLLM's own "
            "files: name a tree without it (--tree) or a wheel (--wheel), or revert it. "
            "`vllm-kv-checksum status` tells whether what is applied is in place"
        )

    def read(path: str) -> bytes | None:
        file = package / path
        return file.read_bytes() if file.is_file() else None

    return Stock(str(package), read_version(package), read)


def bound_in(scope: ast.AST) -> set[str]:
    """Return the names that a scope's own statements bind, and a function's parameters."""
    names: set[str] = set()
    if isinstance(scope, _Function):
        names |= set(parameters_of(scope))
    pending: list[ast.AST] = list(getattr(scope, "body", []))
    while pending:
        node = pending.pop()
        if isinstance(node, _Definition):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):  # a lambda's
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names |= {node.name} if node.name else set()
        pending += ast.iter_child_nodes(node)
    return names


def parameters_of(function: _Function) -> list[str]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return [argument.arg for argument in every]


def stored_in_self(node: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes of ``self`` that some code assigns."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            yield inner.attr


def _base_name(base: ast.expr) -> str:
    """Return the name of a base class, without its type parameters."""
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
