"""Files and folders as they were, so that a failed run can put them back."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_TEMPORARY = ".{}.kv_checksum_tmp"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by a rename; its mode is kept."""
    temporary = path.with_name(_TEMPORARY.format(path.name))
    temporary.write_bytes(data)
    if path.exists():
        shutil.copymode(path, temporary)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@dataclass
class _Saved:
    """One path: what it was, None for absent; a folder's files by relative name."""

    path: Path
    data: bytes | None = None
    mode: int = 0
    link: str | None = None
    inside: "list[_Saved] | None" = field(default=None)

    @classmethod
    def of(cls, path: Path) -> "_Saved":
        if path.is_symlink():
            return cls(path, link=os.readlink(path))
        if path.is_dir():
            return cls(path, inside=[cls.of(p) for p in sorted(path.iterdir())])
        if path.is_file():
            return cls(path, path.read_bytes(), path.stat().st_mode)
        return cls(path)

    def put_back(self) -> None:
        self.path.with_name(_TEMPORARY.format(self.path.name)).unlink(missing_ok=True)
        if self.data is not None and not self.path.is_symlink():
            if not self.path.is_file() or self.path.read_bytes() != self.data:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(self.data)
            self.path.chmod(self.mode)
            return
        if self.inside is None or self.path.is_symlink():
            remove(self.path)
        if self.link is not None:
            self.path.symlink_to(self.link)
        elif self.inside is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            kept = {saved.path for saved in self.inside}
            for extra in set(self.path.iterdir()) - kept:
                remove(extra)
            for saved in self.inside:
                saved.put_back()


@contextmanager
def transaction(*paths: Path) -> Iterator[None]:
    """On any failure inside, put back these files and folders as they were."""
    saved = [_Saved.of(path) for path in paths]
    try:
        yield
    except BaseException:
        for one in saved:
            one.put_back()
        raise
