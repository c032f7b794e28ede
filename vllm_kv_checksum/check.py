"""Judge whether the series fits a vLLM, known or not. Nothing is written.

What syntax can show is checked: that every anchor is there once, that the code put there
finds the parameters, variables and attributes that it uses, and that what is imported
from vLLM is defined. What a name means is for the tests to show.
"""

import ast
import builtins
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from . import KNOWN_VERSIONS
from .apply import FEATURE
from .edits import Edit, Module, assign
from .imports import add_imports
from .patches import feature_of
from .series import PATCHES, Patch, load_series
from .stock import SCOPES, Stock, bound_in, parameters_of, stored_in_self

_FEATURE_MODULE = "vllm." + FEATURE.replace("/", ".")
_KINDS = {
    "anchor": "anchors",
    "names": "edited functions and classes with all names that the edits use",
    "import": "modules with all that is imported from them",
}
_WITHIN_FUNCTIONS = ("before", "after", "prepend", "keyword")


@dataclass(frozen=True)
class Finding:
    """One thing that a patch needs of vLLM.

    Attributes:
        patch: name of the patch.
        kind: "anchor": a place for an edit; "names": what the code put into one function
            or class uses of it; "import": what is imported from one module.
        file: the file of vLLM that must have it, below the package.
        what: names the thing.
        problem: why it does not fit; empty if it does.

    """

    patch: str
    kind: str
    file: str
    what: str
    problem: str = ""


@dataclass(frozen=True)
class Report:
    """What was found in one vLLM."""

    place: str
    version: str
    findings: list[Finding]

    @property
    def known(self) -> bool:
        return self.version.partition("+")[0] in KNOWN_VERSIONS

    @property
    def problems(self) -> list[Finding]:
        return [f for f in self.findings if f.problem]

    def patches(self) -> dict[str, bool]:
        """Return every patch with whether all that it needs is there."""
        broken = {f.patch for f in self.problems}
        return {p.name: p.name not in broken for p in PATCHES}

    def to_json(self) -> str:
        content = {
            "vllm": self.version,
            "known": self.known,
            "place": self.place,
            "fits": not self.problems,
            "patches": self.patches(),
            "findings": [asdict(f) for f in self.findings],
        }
        return json.dumps(content, indent=1)

    def to_text(self) -> str:
        """Return every finding by patch, and at the end what does not fit."""
        lines = []
        for name, fits in self.patches().items():
            lines.append(f"{name}: {'fits' if fits else 'does not fit'}")
            for f in self.findings:
                if f.patch == name:
                    found = f"MISSING ({f.problem})" if f.problem else "found"
                    lines.append(f"    {f.kind} {f.file}: {f.what}: {found}")
        lines.append("")
        for kind, label in _KINDS.items():
            ours = [f for f in self.findings if f.kind == kind]
            fitting = sum(not f.problem for f in ours)
            lines.append(f"found {fitting} of {len(ours)} {label}")
        return "\n".join([*lines, self._conclusion()]) + "\n"

    def _conclusion(self) -> str:
        name = f"vLLM {self.version} ({'known' if self.known else 'unknown'} version)"
        if self.problems:
            told = [
                f"  {f.kind} {f.file}: {f.what}: {f.problem}" for f in self.problems
            ]
            works = ", ".join(n for n, fits in self.patches().items() if fits)
            return "\n".join(
                [
                    f"{name} in {self.place} does not fit:",
                    *told,
                    f"patches that fit: {works or 'none'}",
                    "apply puts in all of them or none. Nothing was written",
                ]
            )
        how = "apply" if self.known else "apply --force, and then your own tests"
        return f"{name} in {self.place} fits: {how}. Nothing was written"


def check(stock: Stock, feature: Mapping[str, bytes]) -> Report:
    """Look for all that the series and the feature's modules need of vLLM.

    Args:
        stock: the vLLM to judge.
        feature: the feature's modules, by path below its folder.

    """
    added = _added_members(m for patch in PATCHES for m in patch.edits())
    findings: list[Finding] = []
    for patch in PATCHES:
        for module in filter(lambda m: m.concerns(stock.version), patch.edits()):
            findings += _check_module(stock, patch, module, added)
        imports = [c for m in patch.edits() for c in m.import_code]
        imports += [feature[n].decode("utf-8") for n in feature_of(patch, feature)]
        findings += _check_imports(stock, patch, imports)
    return Report(stock.place, stock.version, findings)


def _added_members(modules: Iterator[Module]) -> set[str]:
    """Return the names of attributes that the series itself brings."""
    names: set[str] = set()
    for module in modules:
        for edit in module.edits:
            code = _parse(edit)
            names |= bound_in(code) | set(stored_in_self(code))
    return names


def _check_module(
    stock: Stock, patch: Patch, module: Module, added: set[str]
) -> Iterator[Finding]:
    concerned = [e for e in module.edits if e.concerns(stock.version)]
    tree = stock.tree(module.path)
    if tree is None:
        why = stock.why_unreadable(module.path)
        for edit in concerned:
            yield Finding(patch.name, "anchor", module.path, _described(edit), why)
        return
    source = (stock.read(module.path) or b"").decode("utf-8")
    places = list(module.check(source, stock.version))
    for edit, why in places:
        yield Finding(patch.name, "anchor", module.path, _described(edit), why)
    for code in module.import_code:
        try:
            add_imports(source, code)
        except ValueError as error:
            what = "a place for imports"
            yield Finding(patch.name, "anchor", module.path, what, str(error))
    fitting = [edit for edit, why in places if not why]
    yield from _check_names(stock, patch, module, fitting, tree, added)


def _described(edit: Edit) -> str:
    """Name an anchor for people."""
    anchor = str(edit.anchor)
    if isinstance(edit.anchor, assign):
        anchor += " = ..."
        if edit.anchor.keyword:
            anchor = f"{edit.anchor} = ...({edit.anchor.keyword}=...)"
    return {
        "define": f"{edit.scope} (before it)",
        "prepend": f"{edit.scope} (first in it)",
        "method": f"{edit.scope} (last in it)",
        "keyword": f"{edit.scope}, the call of {anchor}",
    }.get(edit.where, f"{edit.scope}, {edit.where} `{anchor}`")


def _check_names(
    stock: Stock,
    patch: Patch,
    module: Module,
    edits: Sequence[Edit],
    tree: ast.Module,
    added: set[str],
) -> Iterator[Finding]:
    """Yield, by function or class, whether it has the names that the edits use."""
    known = bound_in(tree) | set(dir(builtins))
    for code in module.import_code:
        for node in ast.walk(ast.parse(code)):
            known |= bound_in(node) if isinstance(node, ast.Module | ast.If) else set()
    for edit in module.edits:
        known |= bound_in(_parse(edit)) if edit.where == "define" else set()
    by_scope: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_scope[edit.scope].append(edit)
    for scope, ours in by_scope.items():
        path = _path_to(tree, scope)
        bound, parameters = set(known), []
        for node in path:
            if not isinstance(node, ast.ClassDef):
                bound |= bound_in(node)
                parameters += parameters_of(node)
        codes = [_parse(edit) for edit in ours]
        if isinstance(path[-1], ast.ClassDef) or ours[0].where in _WITHIN_FUNCTIONS:
            bound |= bound_in(path[-1]).union(*map(bound_in, codes))
        needed = sorted({n for c in codes for n in _needed(c)} - set(dir(builtins)))
        used = sorted({n for c in codes for n in _used_of_self(c)})
        lacking = [n for n in needed if n not in bound]
        lacking += [
            f"{e.anchor}({k}=...)"
            for e in ours
            if e.where == "keyword"
            for k in _keywords(e)
            if k not in stock.members(module.path, e.anchor) | added
        ]
        if used and isinstance(path[0], ast.ClassDef):
            has = stock.members(module.path, path[0].name) | added
            lacking += [f"self.{n}" for n in used if n not in has]
        relied = [p for p in dict.fromkeys(parameters) if p in needed and p != "self"]
        what = scope
        if relied:
            what += f" (parameters {', '.join(relied)})"
        problem = f"{scope} has no {', '.join(lacking)}" if lacking else ""
        yield Finding(patch.name, "names", module.path, what, problem)


@cache
def _parse(edit: Edit) -> ast.Module:
    code = textwrap.dedent(edit.code).strip("\n")
    return ast.parse(f"_({code.strip()})" if edit.where == "keyword" else code)


def _keywords(edit: Edit) -> Iterator[str]:
    """Yield the names of the arguments that an edit adds to a call."""
    for node in ast.walk(_parse(edit)):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


def _path_to(tree: ast.Module, scope: str) -> list:
    """Return the definitions that lead to a scope, which is there."""
    path: list = [tree]
    for part in scope.split("."):
        path.append(next(n for n in path[-1].body if getattr(n, "name", None) == part))
    return path[1:]


def _needed(code: ast.Module) -> Iterator[str]:
    """Yield the names that code uses and does not bind itself, in annotations, too."""
    own = {"_"}
    for node in ast.walk(code):
        own |= bound_in(node) if isinstance(node, SCOPES) else set()
    for node in ast.walk(code):
        if isinstance(node, ast.Name) and node.id not in own:
            yield node.id
        for name in ("annotation", "returns"):
            note = getattr(node, name, None)
            for inner in ast.walk(note) if note is not None else ():
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield from _needed(ast.parse(inner.value))


def _used_of_self(code: ast.Module) -> Iterator[str]:
    for node in ast.walk(code):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def _check_imports(
    stock: Stock, patch: Patch, sources: Sequence[str]
) -> Iterator[Finding]:
    """Yield, by module of vLLM, whether it defines what is imported from it."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in _imports_of(ast.parse(source)):
            wanted[node.module or ""] |= {alias.name for alias in node.names}
    brought = _definitions()
    for module, names in sorted(wanted.items()):
        if module.partition(".")[0] != "vllm" or module.startswith(_FEATURE_MODULE):
            continue
        path = stock.path_of(module)
        names -= brought.get(path, set())
        missing = sorted(n for n in names if not stock.has(module, n))
        problem = f"{module} has no {', '.join(missing)}" if missing else ""
        if path is None:
            problem = f"vLLM has no module {module}"
        elif stock.tree(path) is None:
            problem = stock.why_unreadable(path)
        elif not names:
            continue
        place = path or module.removeprefix("vllm.").replace(".", "/") + ".py"
        what = ", ".join(sorted(names))
        yield Finding(patch.name, "import", place, what, problem)


def _imports_of(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yield the imports that must succeed: not those whose failure is caught."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) and any(
            h.type is not None and "ImportError" in ast.unparse(h.type)
            for h in child.handlers
        ):
            continue
        if isinstance(child, ast.ImportFrom) and not child.level:
            yield child
        yield from _imports_of(child)


@cache
def _definitions() -> dict[str | None, set[str]]:
    """Return the definitions that the series brings, by the file of vLLM they stand in."""
    found: dict[str | None, set[str]] = defaultdict(set)
    for module in load_series():
        for edit in module.edits:
            if edit.where == "define":
                found[module.path] |= bound_in(_parse(edit))
    return found
