"""Compose the rig's vLLM wheel: the Python tree of one release with the CPU kernels of another."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from vllm_kv_checksum.record import Record

KERNELS = (
    "_C.abi3.so",
    "_C_AVX2.abi3.so",
    "_C_AVX512.abi3.so",
    "fs_io_C.abi3.so",
    "spinloop.abi3.so",
)


class Broken(Exception):
    """A wheel does not hold what it should."""


def compose_wheel(stock: Path, kernels: Path, version: str, folder: Path) -> Path:
    """Write the wheel of ``stock``'s Python files and ``kernels``' shared objects, as ``version``.

    The version must contain "cpu", else vLLM takes the platform for another one. The requirements are
    dropped from the metadata, as the lock file is what decides.
    """
    old, new = _metadata_folder(stock), f"vllm-{version}.dist-info"
    path = folder / f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
    record = Record()
    with (
        zipfile.ZipFile(stock) as trunk,
        zipfile.ZipFile(kernels) as native,
        zipfile.ZipFile(path, "w") as out,
    ):

        def add(name: str, content: bytes) -> None:
            out.writestr(name, content)
            record.add(name, hashlib.sha256(content).digest(), len(content))

        for name in trunk.namelist():
            if name.endswith((".so", "/", "/RECORD")):
                continue
            content = trunk.read(name)
            if name == f"{old}/METADATA":
                content = _metadata(content, version)
            add(name.replace(old, new, 1), content)
        shared = [name for name in native.namelist() if name.endswith(".so")]
        lacking = [name for name in KERNELS if f"vllm/{name}" not in shared]
        if lacking:
            raise Broken(f"{kernels.name} lacks {', '.join(lacking)}")
        for name in shared:
            add(name, native.read(name))
        out.writestr(f"{new}/RECORD", record.text(f"{new}/RECORD"))
    return path


def _metadata_folder(wheel: Path) -> str:
    """Return the name of a wheel's ``.dist-info`` folder."""
    name, version = wheel.name.split("-")[:2]
    return f"{name}-{version}.dist-info"


def _metadata(content: bytes, version: str) -> bytes:
    """Return the metadata of vLLM with the rig's version and no requirements."""
    head, blank, body = content.partition(b"\n\n")
    lines = [
        line for line in head.split(b"\n") if not line.startswith(b"Requires-Dist:")
    ]
    was = f"Version: {version.split('+')[0]}".encode()
    if was not in lines:
        raise Broken(f"the metadata does not say {was.decode()!r}")
    new = {b"Name": b"Name: vllm", b"Version": f"Version: {version}".encode()}
    lines = [new.get(line.partition(b":")[0], line) for line in lines]
    return b"\n".join(lines) + blank + body
