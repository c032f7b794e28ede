"""Write the series as patches in mail format, one step each, for ``git am``."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import format_datetime, formataddr, parseaddr
from pathlib import Path

from .apply import FEATURE, InstallError, make_plan, read_manifest, refuse_wheel
from .diff import file_diff
from .patch_files import files_of_patches
from .series import PATCHES, Patch, load_series

_NO_COMMIT = "0" * 40
_FALLBACK_AUTHOR = "vllm-kv-checksum <vllm-kv-checksum@localhost>"


@dataclass(frozen=True)
class Change:
    """One file of a patch; `old` is None for a new file."""

    path: str
    old: bytes | None
    new: bytes


def write_patches(
    package: Path,
    feature_dir: Path,
    folder: Path,
    *,
    author: str | None = None,
    checkout: Path | None = None,
) -> list[Path]:
    """Write the numbered patches of the series and return their paths.

    Args:
        package: the ``vllm`` package to edit; what is applied to it counts as absent.
        feature_dir: the feature's modules.
        folder: where to write; it is made, and must not hold patches already.
        author: ``Name <address>``; git's own identity if None.
        checkout: the project's checkout, whose tests and documents go with the patches;
            None leaves them out.

    Raises:
        InstallError: an anchor does not fit, or the folder holds patches.

    """
    manifest = read_manifest(package)
    if manifest is not None:
        refuse_wheel(package, manifest)
    if sorted(folder.glob("*.patch")):
        raise InstallError(f"{folder} holds patches already: name an empty folder")
    sender = author or _git_author() or _FALLBACK_AUTHOR
    if re.fullmatch(r"[^<>]+ <[^<>\s]+@[^<>\s]+>", sender) is None:
        raise InstallError(f"--from {sender!r} is not of the form 'Name <address>'")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    patches = [*changes_of_patches(package, feature_dir, checkout)]
    # One that changes nothing of this release is not there.
    patches = [(patch, changes) for patch, changes in patches if changes]
    for number, (patch, changes) in enumerate(patches, 1):
        path = folder / f"{number:04}-{patch.name}.patch"
        place = f"{number:02}/{len(patches)}"
        path.write_text(_mail(patch, place, changes, sender), "utf-8", newline="\n")
        written.append(path)
    return written


def changes_of_patches(
    package: Path, feature_dir: Path, checkout: Path | None = None
) -> Iterator[tuple[Patch, list[Change]]]:
    """Yield each patch with the files that it changes or adds, by path in vLLM."""
    plan = make_plan(package, load_series(), feature_dir, force=True)
    now: dict[str, bytes] = dict(plan.originals)
    feature = [feature_of(patch, plan.feature) for patch in PATCHES]
    files = files_of_patches(PATCHES, feature, checkout) if checkout else []
    for number, patch in enumerate(PATCHES, 1):
        changes = []
        edited = {module.path for module in patch.edits()}
        for module in load_series(PATCHES[:number]):
            if module.path not in edited or not module.concerns(plan.vllm_version):
                continue
            source = plan.originals[module.path].decode("utf-8")
            new = module.apply(source, plan.vllm_version).encode("utf-8")
            if new != now[module.path]:
                path = f"vllm/{module.path}"
                changes.append(Change(path, now[module.path], new))
                now[module.path] = new
        for name in feature[number - 1]:
            path = f"vllm/{FEATURE}/{name}"
            changes.append(Change(path, None, plan.feature[name]))
        if checkout is not None:
            changes += [
                Change(path, None, (checkout / path).read_bytes())
                for path in files[number - 1]
            ]
        yield patch, sorted(changes, key=lambda change: change.path)


def feature_of(patch: Patch, feature: Mapping[str, bytes]) -> list[str]:
    """Return the feature's modules that a patch brings."""
    return [
        name
        for name in feature
        if any(
            name == own or (own.endswith("/") and name.startswith(own))
            for own in patch.feature
        )
    ]


def _mail(patch: Patch, place: str, changes: Sequence[Change], sender: str) -> str:
    title, _, text = patch.message.partition("\n")
    date = format_datetime(datetime.now(timezone.utc))
    diffs = "".join(line for c in changes for line in file_diff(c.path, c.old, c.new))
    listed = "".join(f" {c.path}\n" for c in changes)
    return (
        f"From {_NO_COMMIT} Mon Sep 17 00:00:00 2001\n"
        f"From: {formataddr(parseaddr(sender))}\n"
        f"Date: {date}\n"
        f"Subject: [PATCH {place}] {title}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n"
        f"\n{text.strip()}\n---\n{listed}\n{diffs}-- \nvllm-kv-checksum\n\n"
    )


def _git_author() -> str | None:
    """Return git's identity as ``Name <address>``, or None without one."""
    if shutil.which("git") is None:
        return None
    command = ["git", "var", "GIT_AUTHOR_IDENT"]
    result = subprocess.run(command, capture_output=True, text=True)
    found = re.match(r"(.+ <.*>) \d+ [+-]\d+", result.stdout)
    return found[1] if result.returncode == 0 and found else None
