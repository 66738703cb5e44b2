"""Files are written under another name, and moved to their place when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator

# Why a file that is there can't be replaced although it may be written: it is mounted on its own (as into a
# container), or another user's in a folder like /tmp.
_IRREPLACEABLE = (errno.EBUSY, errno.EPERM, errno.EACCES)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a new file to write, and move it to `path` when the block ends without an error.

    An error in the block (a full disk, Ctrl-C) removes the new file and leaves what was at `path`. A symbolic
    link stays, and the file that it points to is replaced. The new file has the permission bits (and, where
    the user may set it, the owner) of the old one; hard links to the old file keep the old content. What
    can't be replaced gets the new content at the end instead: what is not a regular file (`/dev/stdout`, a
    pipe), a file in a folder that takes no new ones, and a file that is mounted on its own.

    Args:
        path: the file's place; its folder must exist.

    Yields:
        A path with the same ending.

    Raises:
        OSError: the file can't be written, before the block is entered or when it is left.
    """
    place = os.fspath(path)
    try:
        old = os.stat(place)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        with _written_elsewhere(place) as elsewhere:
            yield elsewhere
        return
    if old is not None:
        # A read-only file raises an error here; replacing it needs only the right to write to its folder.
        os.close(os.open(place, os.O_WRONLY))
    if os.path.islink(place):
        place = os.path.realpath(place)
    beside = os.path.join(
        os.path.dirname(place), f".lens_mix-{secrets.token_hex(8)}{os.path.splitext(place)[1]}"
    )
    try:
        # Made by hand rather than by `tempfile`, whose files have 0600 whatever the umask is.
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as problem:
        if old is not None and isinstance(problem, PermissionError):
            with _written_elsewhere(place) as elsewhere:
                yield elsewhere
            return
        raise type(problem)(problem.errno, problem.strerror, place) from None
    try:
        new = os.fstat(made)
        os.close(made)
        yield beside
        _settle(beside, old or new)
        try:
            os.replace(beside, place)
        except OSError as problem:
            if old is None or problem.errno not in _IRREPLACEABLE:
                raise
            _copy(beside, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


@contextlib.contextmanager
def _written_elsewhere(place: str) -> Iterator[str]:
    """Give the path of a file in a folder for temporary ones, and copy what it holds to `place` at the end.

    Some writers (safetensors from 0.8 on) put a file of their own in the place of the one they are given,
    also of a device.
    """
    with tempfile.TemporaryDirectory(prefix="lens_mix-") as folder:
        elsewhere = os.path.join(folder, f"new{os.path.splitext(place)[1]}")
        yield elsewhere
        _copy(elsewhere, place)


def _copy(source: str, place: str) -> None:
    with open(source, "rb") as new, open(place, "wb") as old:
        shutil.copyfileobj(new, old)


def _settle(path: str, like: os.stat_result) -> None:
    """Bring a file to the disk with the owner and the permission bits of another."""
    file = os.open(path, os.O_RDWR)
    try:
        # Some file systems notice only here that they are full.
        os.fsync(file)
    finally:
        os.close(file)
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))
