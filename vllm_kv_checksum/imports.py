"""Add import statements to a module, placed as isort's rules demand.

vLLM sorts by ruff's defaults: sections (future, standard library, third party, vLLM),
in each ``import x`` before ``from x import y``, by name; one statement per module,
except that ``as`` has one of its own.
"""

import ast
import sys
from itertools import takewhile

_MAX_COLUMNS = 88
_FIRST_PARTY = "vllm"

_Import = ast.Import | ast.ImportFrom


def add_imports(source: str, code: str) -> str:
    """Return `source` with the imports of `code` among those at its head.

    Args:
        source: a module's source.
        code: import statements; those of an ``if TYPE_CHECKING:`` join the module's.

    Raises:
        ValueError: `code` holds another statement, or the module has no
            ``if TYPE_CHECKING:`` to join.

    """
    for statement in ast.parse(code).body:
        if isinstance(statement, _Import):
            source = _add(source, statement, typing=False)
        elif _is_typing_block(statement):
            assert isinstance(statement, ast.If)
            for inner in statement.body:
                if not isinstance(inner, _Import):
                    raise ValueError(f"not an import: {ast.unparse(inner)}")
                source = _add(source, inner, typing=True)
        else:
            raise ValueError(f"not an import: {ast.unparse(statement)}")
    return source


def head_end(tree: ast.Module) -> int:
    """Return the last line of a module's docstring and the imports behind it."""
    return max((n.end_lineno or 0 for n in _head(tree.body)), default=0)


def _add(source: str, new: _Import, typing: bool) -> str:
    tree = ast.parse(source)
    body = _typing_body(tree) if typing else tree.body
    there = [n for n in _head(body) if isinstance(n, _Import)]
    indent = " " * (body[0].col_offset if typing else 0)
    lines = source.split("\n")
    for old in there:
        if _mergeable(old, new):
            assert isinstance(old, ast.ImportFrom) and isinstance(new, ast.ImportFrom)
            names = {alias.name for alias in (*old.names, *new.names)}
            spread = old.end_lineno != old.lineno
            text = _from_import(old.module or "", names, indent, spread)
            lines[old.lineno - 1 : old.end_lineno] = text
            return "\n".join(lines)
    text = _render(new, indent)
    behind = [n for n in there if _key(n) > _key(new)]
    before = [n for n in there if _key(n) <= _key(new)]
    if behind and (not before or _section(behind[0]) == _section(new)):
        at = behind[0].lineno - 1
        while lines[at - 1].lstrip().startswith("#"):
            at -= 1
        if _section(behind[0]) != _section(new):
            text = [*text, ""]
    elif before:
        at = before[-1].end_lineno or 0
        if _section(before[-1]) != _section(new):
            text = ["", *text]
    else:
        at = head_end(tree)
    lines[at:at] = text
    return "\n".join(lines)


def _head(body: list[ast.stmt]) -> list[ast.stmt]:
    return list(
        takewhile(lambda n: isinstance(n, _Import) or _is_string(n), body),
    )


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_typing_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _typing_body(tree: ast.Module) -> list[ast.stmt]:
    for node in tree.body:
        if _is_typing_block(node):
            assert isinstance(node, ast.If)
            return node.body
    raise ValueError("the module has no `if TYPE_CHECKING:`")


def _mergeable(old: _Import, new: _Import) -> bool:
    if not isinstance(old, ast.ImportFrom) or not isinstance(new, ast.ImportFrom):
        return False
    aliased = any(a.asname for a in (*old.names, *new.names))
    same = (old.module, old.level) == (new.module, new.level)
    return same and not aliased


def _section(node: _Import) -> int:
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return 4
        name = node.module or ""
    else:
        name = node.names[0].name
    top = name.partition(".")[0]
    if top == "__future__":
        return 0
    if top in sys.stdlib_module_names:
        return 1
    return 3 if top == _FIRST_PARTY else 2


def _key(node: _Import) -> tuple[int, bool, str, str]:
    """Order statements as isort does; ``as`` comes behind its module's other names."""
    if isinstance(node, ast.ImportFrom):
        aliased = node.names[0].name.lower() if node.names[0].asname else ""
        return _section(node), True, (node.module or "").lower(), aliased
    return _section(node), False, node.names[0].name.lower(), ""


def _render(node: _Import, indent: str) -> list[str]:
    text = indent + ast.unparse(node)
    if len(text) <= _MAX_COLUMNS or isinstance(node, ast.Import):
        return [text]
    names = {a.name if not a.asname else f"{a.name} as {a.asname}" for a in node.names}
    return _from_import(node.module or "", names, indent)


def _from_import(
    module: str, names: set[str], indent: str, spread: bool = False
) -> list[str]:
    """Write an import in one line if it fits and does not have to `spread`."""
    ordered = sorted(names, key=_name_key)
    text = f"{indent}from {module} import {', '.join(ordered)}"
    if len(text) <= _MAX_COLUMNS and not spread:
        return [text]
    inner = [f"{indent}    {name}," for name in ordered]
    return [f"{indent}from {module} import (", *inner, f"{indent})"]


def _name_key(name: str) -> tuple[int, str]:
    """Order constants before classes before the rest, as isort does by default."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name.lower()
