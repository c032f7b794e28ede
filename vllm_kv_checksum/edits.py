"""Edit modules of vLLM: insert our own lines, placed by the names around them.

An anchor is one statement, found by its syntax tree inside a named function or
class, so neither vLLM's text nor line numbers are kept here. It must match exactly
one statement.
"""

import ast
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from packaging.version import InvalidVersion, Version

from . import KNOWN_VERSIONS
from .imports import add_imports


class AnchorError(Exception):
    """Raised if an anchor matches no statement, or several; `problem` names no file."""

    def __init__(self, path: str, problem: str) -> None:
        self.problem = problem
        known = ", ".join(KNOWN_VERSIONS)
        super().__init__(f"{path}: {problem}; the series is known to fit vLLM {known}")


class assign(str):
    """Anchor: the statement that assigns to this target, whatever the value.

    With `keyword`, the value must be a call with an argument of that name.
    """

    keyword: str | None

    def __new__(cls, target: str, keyword: str | None = None) -> "assign":
        anchor = super().__new__(cls, target)
        anchor.keyword = keyword
        return anchor


_HEADS: dict[type[ast.stmt], tuple[str, ...]] = {
    ast.If: ("test",),
    ast.While: ("test",),
    ast.For: ("target", "iter"),
    ast.With: ("items",),
}


def version_key(version: str) -> tuple[int, ...]:
    """Return a version's release numbers, to compare by; without any it is the newest.

    A release candidate counts as its release.
    """
    try:
        return Version(version).release
    except InvalidVersion:
        return (2**31,)


_ScopeNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Insert:
    """Code to insert behind a line.

    `before` tells whether it belongs to the statement that follows the line.
    """

    line: int
    indent: int
    before: bool
    code: str

    def order(self) -> tuple[int, bool, int]:
        """Return the sort key at one line: what ends inner blocks, then what opens the next."""
        return self.line, self.before, 0 if self.before else -self.indent


@dataclass(frozen=True)
class Edit:
    """One insertion.

    `where` is "before" or "after" the anchor, "define" (before a top-level definition),
    "prepend" (first in the scope, no anchor), "method" (last in a class, no anchor) or
    "keyword" (into a call). The edit is made in versions of vLLM from `since` on and below
    `below`, where they are given.
    """

    scope: str
    where: str
    code: str
    anchor: str = ""
    past_docstring: bool = False
    since: str = ""
    below: str = ""

    def concerns(self, version: str) -> bool:
        key = version_key(version)
        return (not self.since or key >= version_key(self.since)) and (
            not self.below or key < version_key(self.below)
        )


@dataclass
class Scope:
    """Collects the edits of one function or class."""

    name: str
    edits: list[Edit] = field(default_factory=list)

    def before(self, anchor: str, code: str) -> None:
        """Insert `code` before the anchor and the comment directly above it."""
        self.edits.append(Edit(self.name, "before", code, anchor))

    def after(self, anchor: str, code: str, *, past_docstring: bool = False) -> None:
        """Insert `code` behind the anchor, or behind the docstring that follows it."""
        self.edits.append(Edit(self.name, "after", code, anchor, past_docstring))

    def prepend(self, code: str) -> None:
        """Insert `code` first, behind the scope's own docstring."""
        self.edits.append(Edit(self.name, "prepend", code))

    def method(self, code: str) -> None:
        """Append `code`, a method or several, to a class."""
        self.edits.append(Edit(self.name, "method", code))

    def keyword(self, function: str, code: str) -> None:
        """Insert `code`, a keyword argument, last into the one call of `function`.

        The call must spread over lines and end with a keyword argument and a comma.
        """
        self.edits.append(Edit(self.name, "keyword", code, function))


class Module:
    """Collects the edits of one file; `path` is relative to the ``vllm`` package."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.import_code: list[str] = []
        self.edits: list[Edit] = []

    def imports(self, code: str) -> None:
        """Add import statements to those at the module's head, in isort's order.

        Those inside ``if TYPE_CHECKING:`` join the module's own.
        """
        self.import_code.append(textwrap.dedent(code))

    def define(self, before: str, code: str) -> None:
        """Insert a top-level definition in front of another."""
        self.edits.append(Edit(before, "define", code))

    @contextmanager
    def function(
        self, name: str, *, since: str = "", below: str = ""
    ) -> Iterator[Scope]:
        """Edit a function, named ``Class.method`` or ``function``.

        Args:
            name: where the edits stand.
            since: first version of vLLM to edit.
            below: first later version that is not edited any more.

        """
        scope = Scope(name)
        yield scope
        self.edits += [replace(e, since=since, below=below) for e in scope.edits]

    cls = function

    def concerns(self, version: str) -> bool:
        """Return whether this version of vLLM has the file, as far as edits tell."""
        return not self.edits or any(e.concerns(version) for e in self.edits)

    def apply(self, source: str, version: str = "") -> str:
        """Edit the source of this version of vLLM; without one, of the newest.

        Raises:
            AnchorError: an anchor or a scope does not match exactly once.
            SyntaxError: the result does not compile.

        """
        tree, lines = ast.parse(source), _lines(source)
        concerned = [e for e in self.edits if e.concerns(version)]
        inserts = [self._place(tree, lines, e) for e in concerned]
        # From the end, so that earlier line numbers stay right.
        for insert in reversed(sorted(inserts, key=_Insert.order)):
            lines[insert.line : insert.line] = [_indented(insert.code, insert.indent)]
        edited = "".join(lines)
        for code in self.import_code:
            try:
                edited = add_imports(edited, code)
            except ValueError as error:
                raise AnchorError(self.path, str(error)) from None
        compile(edited, self.path, "exec")
        return edited

    def check(self, source: str, version: str = "") -> Iterator[tuple[Edit, str]]:
        """Yield every edit that concerns a version, with why it finds no place, if so.

        Raises:
            SyntaxError: the source is not one of this Python.

        """
        tree, lines = ast.parse(source), _lines(source)
        for edit in self.edits:
            if not edit.concerns(version):
                continue
            problem = ""
            try:
                self._place(tree, lines, edit)
            except AnchorError as error:
                problem = error.problem
            yield edit, problem

    def _place(self, tree: ast.Module, lines: list[str], edit: Edit) -> "_Insert":
        scope = self._scope(tree, edit.scope)
        if edit.where == "define":
            code = textwrap.dedent(edit.code).strip("\n") + "\n\n\n"
            return _Insert(_line_above(scope, lines), 0, True, code)
        if edit.where == "method":
            last = scope.body[-1]
            code = "\n\n" + textwrap.dedent(edit.code).strip("\n")
            return _Insert(last.end_lineno or 0, last.col_offset, False, code)
        if edit.where == "prepend":
            first = scope.body[1 if ast.get_docstring(scope) is not None else 0]
            line = _line_above(first, lines)
            return _Insert(line, first.col_offset, True, edit.code)
        if edit.where == "keyword":
            calls = [
                node
                for node in ast.walk(scope)
                if isinstance(node, ast.Call)
                and node.keywords
                and ast.unparse(node.func) == edit.anchor
            ]
            self._check_matches(edit, len(calls), "calls")
            indent = calls[0].keywords[-1].col_offset
            line = (calls[0].end_lineno or 1) - 1
            return _Insert(line, indent, True, edit.code.strip() + ",")
        matches = [
            (body, i)
            for body, i in _statements(scope)
            if _matches(edit.anchor, body[i])
        ]
        self._check_matches(edit, len(matches), "statements")
        body, i = matches[0]
        statement = body[i]
        if edit.where == "before":
            line = _line_above(statement, lines)
            return _Insert(line, statement.col_offset, True, edit.code)
        end = statement
        if edit.past_docstring and i + 1 < len(body) and _is_docstring(body[i + 1]):
            end = body[i + 1]
        line = end.end_lineno or end.lineno
        return _Insert(line, statement.col_offset, False, edit.code)

    def _check_matches(self, edit: Edit, found: int, kind: str) -> None:
        if found != 1:
            raise AnchorError(
                self.path,
                f"in {edit.scope}, the anchor {str(edit.anchor)!r} matches {found} "
                f"{kind}, not one",
            )

    def _scope(self, tree: ast.Module, name: str) -> "_ScopeNode":
        node: ast.AST = tree
        for part in name.split("."):
            found = [
                n
                for n in getattr(node, "body", [])
                if isinstance(n, _ScopeNode) and n.name == part
            ]
            if len(found) != 1:
                raise AnchorError(
                    self.path, f"{name} is defined {len(found)} times, not once"
                )
            node = found[0]
        assert isinstance(node, _ScopeNode)
        return node


def _lines(source: str) -> list[str]:
    """Split a source as Python counts its lines: splitlines() knows more line ends."""
    lines = [line + "\n" for line in source.split("\n")]
    lines[-1] = lines[-1].removesuffix("\n")
    return lines


def _indented(code: str, indent: int) -> str:
    """Dedent `code`, drop its first line end, indent it and end it with one line end.

    A blank line at its end stays.
    """
    text = textwrap.dedent(code)
    blank = "\n" * max(0, len(text) - len(text.rstrip("\n")) - 1)
    text = text.rstrip("\n").removeprefix("\n")
    return textwrap.indent(text, " " * indent) + "\n" + blank


def _line_above(statement: ast.stmt, lines: list[str]) -> int:
    """Return the number of lines above a statement, its decorators and its comment."""
    decorators = getattr(statement, "decorator_list", [])
    line = min([statement.lineno, *(d.lineno for d in decorators)]) - 1
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _statements(scope: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield every statement in a scope as (block, index), without nested scopes."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(scope, name, None) or []
        for i, child in enumerate(block):
            if isinstance(child, ast.stmt):
                yield block, i
            if not isinstance(child, _ScopeNode):
                yield from _statements(child)


def _matches(anchor: str, statement: ast.stmt) -> bool:
    if isinstance(anchor, assign):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        else:
            target = getattr(statement, "target", None)
            if not isinstance(statement, ast.AnnAssign | ast.AugAssign):
                return False
            targets = [target]  # type: ignore[list-item]
        if anchor.keyword is not None:
            keywords = getattr(statement.value, "keywords", ())
            if all(k.arg != anchor.keyword for k in keywords):
                return False
        return len(targets) == 1 and ast.unparse(targets[0]) == anchor
    if anchor.endswith(":"):
        wanted = ast.parse(f"{anchor}\n    pass").body[0]
        fields = _HEADS.get(type(wanted), ())
        return type(statement) is type(wanted) and all(
            _dump(getattr(statement, f)) == _dump(getattr(wanted, f)) for f in fields
        )
    return ast.dump(statement) == ast.dump(ast.parse(anchor).body[0])


def _dump(value: object) -> object:
    if isinstance(value, list):
        return [ast.dump(v) for v in value]
    assert isinstance(value, ast.AST)
    return ast.dump(value)
