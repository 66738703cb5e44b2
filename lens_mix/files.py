"""Write files under a temporary name, and move them to their path when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator

# These errors mean that an existing file can be written but not replaced: it is a mount of its own (as in a
# container), or it belongs to another user in a folder like /tmp.
_IRREPLACEABLE = (errno.EBUSY, errno.EPERM, errno.EACCES)


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
