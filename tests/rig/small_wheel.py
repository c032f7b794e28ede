"""Make a small wheel in the place of vLLM's own: the files that the series edits, as vLLM has them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from vllm_kv_checksum import apply as installer
from vllm_kv_checksum.edits import Module
from vllm_kv_checksum.series import load_series

VERSION = installer.read_version(installer.find_package(None)).split("+")[0]
NAME = "vllm-{}-cp38-abi3-linux_x86_64.whl"
TOOL = "vllm/tool"


def row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"{name},sha256={digest.rstrip(b'=').decode()},{len(data)}"


def make_wheel(folder: Path, version: str = VERSION, damaged: bool = False) -> Path:
    """Return a wheel of those files of the installed vLLM that the series edits."""
    package = installer.find_package(None)
    backups = package / installer.MANIFEST_DIR / "originals"
    files = {"vllm/_version.py": f'__version__ = "{VERSION}"'.encode(), TOOL: b"#!\n"}
    series = [m for m in load_series() if m.concerns(VERSION)]
    for module in [*series, Module("v1/core/sched/scheduler.py")]:
        files[f"vllm/{module.path}"] = (backups / module.path).read_bytes()
    info = f"vllm-{version}.dist-info"
    about = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n\nVersion: text\n"
    files[f"{info}/METADATA"] = about.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"
    rows = [row(name, data) for name, data in files.items()] + [f"{info}/RECORD,,"]
    files[f"{info}/RECORD"] = "\n".join(rows).encode()
    if damaged:
        files[TOOL] += b"rm\n"
    folder.mkdir(exist_ok=True)
    path = folder / NAME.format(version)
    with zipfile.ZipFile(path, "w") as out:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            member.external_attr = (0o100755 if name == TOOL else 0o100644) << 16
            stored = name == "vllm/_version.py"
            kind = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            out.writestr(member, data, kind)
    return path
