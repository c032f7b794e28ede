"""Keep new files in a vLLM tree readable for all who may read vLLM's own files.

New files and folders take the mode and owner of a neighbour instead of what the umask
leaves, so that a root shell with umask 077 does not lock out the user that vLLM runs as.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def adopt(path: Path, like: Path) -> None:
    """Give a file or folder the mode of another, and its owner where that is allowed."""
    model = like.stat()
    own(path, model.st_uid, model.st_gid)
    path.chmod(stat.S_IMODE(model.st_mode))


def own(path: Path, uid: int, gid: int) -> None:
    """Give a file, folder or link an owner and a group, as far as that is allowed."""
    now = path.lstat()
    if (now.st_uid, now.st_gid) == (uid, gid):
        return
    for owner in (uid, -1):
        with suppress(PermissionError):
            os.chown(path, owner, gid, follow_symlinks=False)
            return


def make_folder(path: Path, like: Path) -> None:
    """Make a folder, and those between it and `like`, with the mode and owner of `like`."""
    if path.parent != like:
        make_folder(path.parent, like)
    path.mkdir(exist_ok=True)
    adopt(path, like)


def unreadable(pairs: Iterable[tuple[Path, Path]]) -> list[Path]:
    """Return the paths that fewer users may read than the path that they are paired with."""
    found = []
    for path, like in pairs:
        mode = path.stat().st_mode
        read = 0o055 if stat.S_ISDIR(mode) else 0o044
        if like.stat().st_mode & read & ~mode:
            found.append(path)
    return found


def closed_to_others(path: Path) -> list[Path]:
    """Return the files and folders that keep other users from reading `path`.

    The folders above it count, and so do the modules in it.
    """
    top = path.resolve()
    closed = [p for p in reversed(top.parents) if not p.stat().st_mode & 0o001]
    inside = sorted(top.glob("*.py")) if top.is_dir() else []
    for each in [top, *inside]:
        mode = each.stat().st_mode
        if (0o005 if stat.S_ISDIR(mode) else 0o004) & ~mode:
            closed.append(each)
    return closed
