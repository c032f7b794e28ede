"""Find a mutant's place in a module's source, and return the source with the change."""

import ast

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def changed_source(source: str, function: str, before: str, after: str) -> str:
    """Return ``source`` with ``before`` replaced in one function, or outside of any (``""``).

    Raises ``ValueError`` unless it stands there exactly once.
    """
    begin, end = span_of(source, function)
    part = source[begin:end]
    if part.count(before) != 1:
        where = function or "the module"
        raise ValueError(f"{part.count(before)} times in {where}: {before!r}")
    changed = source[:begin] + part.replace(before, after) + source[end:]
    ast.parse(changed)
    return changed


def span_of(source: str, function: str) -> tuple[int, int]:
    """Return where a function or class begins and ends in ``source``; of ``""`` that is the whole.

    Names of inner ones follow those of the outer, with dots.
    """
    node: ast.AST = ast.parse(source)
    for name in function.split(".") if function else ():
        named = [
            child
            for child in ast.walk(node)
            if isinstance(child, _NAMED) and child.name == name
        ]
        if not named:
            raise ValueError(f"no {function}")
        node = named[0]
    if isinstance(node, ast.Module):
        return 0, len(source)
    lines = source.splitlines(keepends=True)
    assert isinstance(node, _NAMED)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    begin, end = lines[: first - 1], lines[: node.end_lineno]
    return len("".join(begin)), len("".join(end))
