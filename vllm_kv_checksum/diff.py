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
        parts += _diff(f"a/vllm/{name}", f"b/vllm/{name}", old, plan.edited[name])
    for name, data in plan.feature.items():
        path = f"vllm/{FEATURE}/{name}"
        parts += [f"diff --git a/{path} b/{path}\n", "new file mode 100644\n"]
        parts += _diff("/dev/null", f"b/{path}", b"", data)
    return "".join(parts)


def _diff(old_name: str, new_name: str, old: bytes, new: bytes) -> Iterator[str]:
    # Not str.splitlines(), which also splits at what is no end of line to git.
    before, after = (
        io.StringIO(data.decode("utf-8"), newline="\n").readlines()
        for data in (old, new)
    )
    for line in difflib.unified_diff(before, after, old_name, new_name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
