"""Print what applying would change, as a unified diff."""

import difflib
import io
from collections.abc import Iterator
from pathlib import Path

from .apply import FEATURE, make_plan, read_manifest, refuse_wheel
from .edits import Module


def diff(package: Path, series: list[Module], feature_dir: Path) -> str:
    """Return the diff of applying, for ``git apply`` in the folder of the package."""
    manifest = read_manifest(package)
    if manifest is not None:
        refuse_wheel(package, manifest)
    plan = make_plan(package, series, feature_dir, force=True)
    parts: list[str] = []
    for name, old in plan.originals.items():
        if old != plan.edited[name]:
            parts += file_diff(f"vllm/{name}", old, plan.edited[name])
    for name, data in plan.feature.items():
        parts += file_diff(f"vllm/{FEATURE}/{name}", None, data)
    return "".join(parts)


def file_diff(path: str, old: bytes | None, new: bytes) -> Iterator[str]:
    """Yield the lines of one file's diff in git's format; `old` None: it is new."""
    yield f"diff --git a/{path} b/{path}\n"
    old_name = f"a/{path}"
    if old is None:
        yield "new file mode 100644\n"
        old_name = "/dev/null"
    # Not str.splitlines(), which also splits at what is no end of line to git.
    before, after = (
        io.StringIO(data.decode("utf-8"), newline="\n").readlines()
        for data in (old or b"", new)
    )
    for line in difflib.unified_diff(before, after, old_name, f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
