"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def written_beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a file to write, which takes the place of `path` when the block ends well.

    If the block fails, the file that was there stays as it was. Whoever has that file open, or mapped into
    memory, keeps the old content. Links are followed, permissions kept. What is not a regular file
    (`/dev/stdout`) is written as it is, and so is a file in a folder that takes no new one.

    Raises:
        PermissionError: the file that is there may not be written.
    """
    place = os.path.realpath(path)
    folder, there = os.path.dirname(place), os.path.exists(place)
    if there and not os.access(place, os.W_OK):
        raise PermissionError(f"path: expected a file that can be written, got {place}")
    if (there and not os.path.isfile(place)) or not os.access(folder, os.W_OK):
        yield place
        return
    beside = os.path.join(folder, f".lens_mix-{uuid.uuid4().hex}.part")
    try:
        yield beside
        if there:
            shutil.copymode(place, beside)
        os.replace(beside, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
