# SPDX-License-Identifier: Apache-2.0
"""Small helpers for files: a lock and an atomic replacement."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

from .errors import UserError


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock; a second run waits until the first is done."""
    # Not at the top: a container's Python patches without it.
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(path)
        try:
            held.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another run that holds {path}", flush=True)
            held.acquire()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        held.release()


@contextmanager
def folder_lock(folder: Path, shown: Path) -> Iterator[None]:
    """Hold ``folder`` itself as a lock, so that nothing is left in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run on {shown}", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def writable(folder: Path) -> Path:
    """Make the folder if need be; asked before the run that has something to write.

    Raises:
        UserError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
    except OSError as error:
        raise UserError(
            f"nothing can be written to {folder} ({error.strerror}): make it a folder "
            "with room that you may write to"
        ) from error
    return folder


def replace(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old or the new, whole."""
    with NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def flush(path: Path) -> None:
    """Wait until the file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
