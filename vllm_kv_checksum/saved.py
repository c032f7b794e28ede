"""Change files whole or not at all, and put them back on a failure."""

import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .access import adopt, own

_TEMPORARY = ".{}.kv_checksum_tmp"


READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
LOCK = ".kv_checksum_lock"


@contextmanager
def locked(package: Path) -> Iterator[None]:
    """Let one run at a time change this package; a second one prints so and waits.

    If this user may not create the lock, nothing can be changed either, and the attempt
    to change it fails.
    """
    path = package / LOCK
    try:
        descriptor = _lock(path)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock; closing it, even by SIGKILL, frees it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"vllm-kv-checksum: waiting for another run on {path.parent} to end",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # If the run that had the lock has removed the file, this locks nothing.
        if _is_open_as(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_open_as(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, data: bytes, like: Path) -> None:
    """Replace `path` by a rename once its content is on disk.

    Args:
        path: the file to replace or create.
        data: its new content.
        like: the file whose mode and owner it gets; `path` itself keeps its own.

    """
    temporary = path.with_name(_TEMPORARY.format(path.name))
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    adopt(temporary, like)
    os.replace(temporary, path)


def sync_folders(folders: Iterable[Path]) -> None:
    """Wait until all that was renamed, created or removed in these folders is on disk."""
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@dataclass
class _Saved:
    """The saved state of one path, to be put back.

    `stat` is None if nothing was there. A file has `data`, a link `link`, and a folder
    the saved states `inside` it.
    """

    path: Path
    stat: os.stat_result | None = None
    data: bytes | None = None
    link: str | None = None
    inside: "list[_Saved] | None" = field(default=None)

    @classmethod
    def of(cls, path: Path) -> "_Saved":
        if path.is_symlink():
            return cls(path, path.lstat(), link=os.readlink(path))
        if path.is_dir():
            inside = [cls.of(p) for p in sorted(path.iterdir())]
            return cls(path, path.stat(), inside=inside)
        if path.is_file():
            return cls(path, path.stat(), path.read_bytes())
        return cls(path)

    def put_back(self) -> None:
        self.path.with_name(_TEMPORARY.format(self.path.name)).unlink(missing_ok=True)
        if self.data is not None and not self.path.is_symlink():
            if not self.path.is_file() or self.path.read_bytes() != self.data:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(self.data)
            self._put_back_mode()
            return
        if self.inside is None or self.path.is_symlink():
            remove(self.path)
        if self.link is not None:
            self.path.symlink_to(self.link)
            assert self.stat is not None
            own(self.path, self.stat.st_uid, self.stat.st_gid)
        elif self.inside is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            kept = {saved.path for saved in self.inside}
            for extra in set(self.path.iterdir()) - kept:
                remove(extra)
            for saved in self.inside:
                saved.put_back()
            self._put_back_mode()

    def _put_back_mode(self) -> None:
        assert self.stat is not None
        own(self.path, self.stat.st_uid, self.stat.st_gid)
        if self.path.stat().st_mode != self.stat.st_mode:
            self.path.chmod(stat.S_IMODE(self.stat.st_mode))


@contextmanager
def transaction(*paths: Path) -> Iterator[None]:
    """Put these files and folders back as they were if anything inside fails."""
    saved = [_Saved.of(path) for path in paths]
    try:
        yield
    except BaseException:
        for one in saved:
            one.put_back()
        raise
