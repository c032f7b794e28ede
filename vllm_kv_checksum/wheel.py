"""Write a patched wheel from an official one, for people who pin images.

Its metadata has a local version, so that pip tells both apart; `vllm.__version__` stays,
as NIXL's handshake compares it. Inside is a manifest, so `status` knows what was done;
the originals are not, so there is no way back but vLLM's own wheel. Files are copied
in pieces: a wheel of vLLM does not fit everybody's memory.
"""

import csv
import hashlib
import io
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .access import adopt
from .apply import (
    EVERY_VLLM_HAS,
    FEATURE,
    MANIFEST_DIR,
    FileRecord,
    InstallError,
    Manifest,
    plan_edits,
    read_feature,
    sha256,
)
from .edits import Module
from .record import Record
from .saved import sync_folders

LOCAL_VERSION = "kvchecksum.1"

_PIECE = 1 << 20
_EVERY_VLLM_HAS = f"vllm/{EVERY_VLLM_HAS}"


@dataclass
class Base:
    """An official wheel, with its version and the hashes of its files."""

    path: Path
    archive: zipfile.ZipFile
    info: str
    version: str
    hashes: dict[str, str]

    def read(self, name: str) -> bytes:
        try:
            return self.archive.read(name)
        except KeyError:
            raise InstallError(f"{self.path} has no {name}") from None


def patch_wheel(
    base: Path,
    folder: Path,
    series: list[Module],
    feature_dir: Path,
    *,
    force: bool = False,
) -> Path:
    """Write the patched wheel of `base` into `folder`, and return its path.

    Raises:
        InstallError: `base` is not an intact, unpatched wheel of a known vLLM, or the
            output exists or cannot be written. Nothing is left in `folder`.

    """
    try:
        with zipfile.ZipFile(base) as archive:
            source = open_base(base, archive)
            version = _patched_version(source.version)
            target = folder / _file_name(base, source.version, version)
            if target.exists():
                raise InstallError(f"{target} exists: remove it or choose another -o")
            files = _changed_files(source, version, series, feature_dir, force)
            if not folder.exists():
                folder.mkdir(parents=True)
                adopt(folder, base.resolve().parent)
            _write(source, version, files, target)
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError) as error:
        raise InstallError(f"{base} is not an intact wheel: {error}") from None
    except OSError as error:
        raise InstallError(
            f"{error.filename or folder}: {error.strerror or error}"
        ) from error
    return target


def open_base(path: Path, archive: zipfile.ZipFile) -> Base:
    """Read what a wheel of vLLM says of itself.

    Raises:
        InstallError: it is no wheel of vLLM, or patched already.

    """
    names = set(archive.namelist())
    infos = [
        n.split("/")[0] for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)
    ]
    if _EVERY_VLLM_HAS not in names or len(infos) != 1:
        raise InstallError(f"{path} is not a wheel of vLLM")
    if any(n.startswith((f"vllm/{FEATURE}/", f"vllm/{MANIFEST_DIR}/")) for n in names):
        raise InstallError(f"{path} is patched already: give vLLM's own wheel")
    metadata = archive.read(f"{infos[0]}/METADATA").decode("utf-8")
    version = re.search(r"^Version: (\S+)", metadata, re.M)
    if version is None:
        raise InstallError(f"{path} is not a wheel of vLLM: it names no version")
    record = archive.read(f"{infos[0]}/RECORD").decode("utf-8")
    hashes = {row[0]: row[1] for row in csv.reader(io.StringIO(record)) if row}
    return Base(path, archive, infos[0], version[1], hashes)


def _patched_version(version: str) -> str:
    return f"{version}{'.' if '+' in version else '+'}{LOCAL_VERSION}"


def _file_name(base: Path, old: str, new: str) -> str:
    parts = base.name.split("-")
    if len(parts) < 5 or parts[1] != old or base.suffix != ".whl":
        raise InstallError(
            f"{base.name} is not the name that the wheel of vLLM {old} was published by"
        )
    return "-".join([parts[0], new, *parts[2:]])


def _changed_files(
    base: Base, version: str, series: list[Module], feature_dir: Path, force: bool
) -> dict[str, bytes]:
    """Return the files that replace the base's in the patched wheel, or join them."""
    series = [module for module in series if module.concerns(base.version)]
    originals = {m.path: base.read(f"vllm/{m.path}") for m in series}
    feature = read_feature(feature_dir)
    plan = plan_edits(series, originals, feature, base.version, force)
    manifest = Manifest(
        "applied",
        version,
        plan.series_version,
        linked=False,
        files={
            name: FileRecord(sha256(originals[name]), sha256(new))
            for name, new in plan.edited.items()
        },
        feature={name: sha256(data) for name, data in feature.items()},
        wheel=True,
    )
    metadata = base.read(f"{base.info}/METADATA").decode("utf-8")
    metadata = re.sub(r"(?m)^Version: \S+", f"Version: {version}", metadata, count=1)
    return {
        **{f"vllm/{name}": data for name, data in plan.edited.items()},
        f"{base.info}/METADATA": metadata.encode("utf-8"),
        **{f"vllm/{FEATURE}/{name}": data for name, data in feature.items()},
        f"vllm/{MANIFEST_DIR}/manifest.json": manifest.to_json(),
    }


def _write(base: Base, version: str, files: dict[str, bytes], target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            with zipfile.ZipFile(file, "w") as out:
                _fill(base, version, files, out)
            file.flush()
            os.fsync(file.fileno())
        adopt(part, base.path)
        os.replace(part, target)
        sync_folders([target.parent])
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _fill(
    base: Base, version: str, files: dict[str, bytes], out: zipfile.ZipFile
) -> None:
    info = f"{base.info.split('-')[0]}-{version}.dist-info"
    record = Record()
    for member in base.archive.infolist():
        if member.is_dir() or member.filename == f"{base.info}/RECORD":
            continue
        name = re.sub(rf"^{re.escape(base.info)}/", f"{info}/", member.filename)
        new = files.pop(member.filename, None)
        if new is None:
            with base.archive.open(member) as content:
                hashed = _add(out, member, name, content, record)
            if hashed != base.hashes.get(member.filename, hashed):
                raise InstallError(
                    f"{base.path} is damaged: {member.filename} is not what its RECORD "
                    "says; download it again"
                )
        else:
            _add(out, member, name, io.BytesIO(new), record)
    like = base.archive.getinfo(_EVERY_VLLM_HAS)
    for name, new in files.items():
        _add(out, like, name, io.BytesIO(new), record)
    own_name = f"{info}/RECORD"
    _add(out, like, own_name, io.BytesIO(record.text(own_name)), Record())


def _add(
    out: zipfile.ZipFile,
    like: zipfile.ZipInfo,
    name: str,
    content: IO[bytes],
    record: Record,
) -> str:
    """Add a file with the mode, date and compression of another; return its hash."""
    member = zipfile.ZipInfo(name, like.date_time)
    member.external_attr = like.external_attr
    member.create_system = like.create_system
    member.compress_type = like.compress_type
    member.file_size = like.file_size
    digest, size = hashlib.sha256(), 0
    with out.open(member, "w") as file:
        while piece := content.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
    return record.add(name, digest.digest(), size)
