"""Files are written under another name, and moved to their place when they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a new file to write, and move it to `path` when the block ends without an error.

    An error in the block (a full disk, Ctrl-C) removes the new file and leaves what was at `path`. A symbolic
    link stays, and the file that it points to is replaced. The new file has the permission bits (and, where
    the user may set it, the owner) of the old one; hard links to the old file keep the old content. What is
    not a regular file (`/dev/stdout`, a pipe) is written directly, and so is an old file in a folder in which
    no file can be created.

    Args:
        path: the file's place; its folder must exist.

    Yields:
        A path in the same folder, with the same ending.

    Raises:
        OSError: the file can't be written, before the block is entered or when it is left.
    """
    place = os.fspath(path)
    try:
        old = os.stat(place)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        yield place
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
            yield place
            return
        raise type(problem)(problem.errno, problem.strerror, place) from None
    try:
        new = os.fstat(made)
        os.close(made)
        yield beside
        _settle(beside, old or new)
        os.replace(beside, place)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)
        raise


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
