"""Write files whole or not at all, with a digest that shows later whether they have changed.

A file is written under a temporary name, and moved to its path when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

# These errors mean that an existing file can be written but not replaced: it is a mount of its own (as in a
# container), or it belongs to another user in a folder like /tmp.
_IRREPLACEABLE = (errno.EBUSY, errno.EPERM, errno.EACCES)

# A file is written with this in the place of its digest.
NO_DIGEST = "0" * 32


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a new file to write, and move it to `path` when the block ends without an error.

    An error in the block (a full disk, Ctrl-C) removes the new file and leaves `path` unchanged. If `path` is
    a symbolic link, the file that it points to is replaced. The new file gets the permission bits of the old
    one, and its owner if the user may set it. Hard links to the old file keep the old content.

    Some files cannot be replaced: those that are not regular files (`/dev/stdout`, a pipe), files in a folder
    where the user may not create files, and files that are mounts of their own. The new content is then
    copied into them at the end.

    Args:
        path: The path of the file, in a folder that exists.

    Yields:
        A path with the same ending.

    Raises:
        OSError: If the file cannot be written, when the block starts or when it ends.
    """
    target = os.fspath(path)
    try:
        old = os.stat(target)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        with _copying(target) as temporary:
            yield temporary
        return
    if old is not None:
        # Opening a read-only file raises an error, while replacing it would need only a writable folder.
        os.close(os.open(target, os.O_WRONLY))
    if os.path.islink(target):
        target = os.path.realpath(target)
    new_path = os.path.join(
        os.path.dirname(target), f".lens_mix-{secrets.token_hex(8)}{os.path.splitext(target)[1]}"
    )
    try:
        # A file of `tempfile` would have the permissions 0600 whatever the umask is.
        descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as problem:
        if old is not None and isinstance(problem, PermissionError):
            with _copying(target) as temporary:
                yield temporary
            return
        raise type(problem)(problem.errno, problem.strerror, target) from None
    try:
        new = os.fstat(descriptor)
        os.close(descriptor)
        yield new_path
        _finish(new_path, old or new)
        try:
            os.replace(new_path, target)
        except OSError as problem:
            if old is None or problem.errno not in _IRREPLACEABLE:
                raise
            _copy(new_path, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new_path)


@contextlib.contextmanager
def _copying(target: str) -> Iterator[str]:
    """Yield the path of a file in a temporary folder, and copy its content to `target` at the end.

    The file must not be `target` itself, because some writers (safetensors since 0.8) replace the file that
    they are given, even if it is a device.
    """
    with tempfile.TemporaryDirectory(prefix="lens_mix-") as folder:
        temporary = os.path.join(folder, f"new{os.path.splitext(target)[1]}")
        yield temporary
        _copy(temporary, target)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as new, open(target, "wb") as old:
        shutil.copyfileobj(new, old)


def _finish(path: str, like: os.stat_result) -> None:
    """Write a file to the disk, with the owner and the permission bits of another."""
    file = os.open(path, os.O_RDWR)
    try:
        # Some file systems raise the error of a full disk only here.
        os.fsync(file)
    finally:
        os.close(file)
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))


def seal(path: str | os.PathLike[str], marker: bytes, last: bool = False) -> None:
    """Write the digest of a file into the file, over `NO_DIGEST`.

    Args:
        path: The file.
        marker: The bytes before the digest.
        last: Whether the digest is after the last marker, and not after the first one.
    """
    with open(path, "r+b") as file:
        start, _, digest = _compute_digest(file, marker, last)
        file.seek(start)
        file.write(digest)


def is_unchanged(path: str | os.PathLike[str], marker: bytes, last: bool = False) -> bool | None:
    """Return whether a file is as `seal` left it; None if it has no digest.

    Args:
        path: The file.
        marker: As in `seal`.
        last: As in `seal`.

    Raises:
        OSError: If the file cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return None
        start, there, digest = _compute_digest(file, marker, last)
    return there == digest if start else None


def _compute_digest(file: BinaryIO, marker: bytes, last: bool) -> tuple[int, bytes, bytes]:
    """Return where the digest of a file is (0: nowhere), the digest there, and that of all other bytes."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.rfind(marker) if last else content.find(marker)
        if place < 0:
            return 0, b"", b""
        start, hashed = place + len(marker), hashlib.blake2b(digest_size=len(NO_DIGEST) // 2)
        stop = start + len(NO_DIGEST)
        with memoryview(content) as view:
            hashed.update(view[:start])
            hashed.update(view[stop:])
        return start, content[start:stop], hashed.hexdigest().encode()
