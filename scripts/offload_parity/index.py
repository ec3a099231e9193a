# SPDX-License-Identifier: Apache-2.0
"""A release's sdist: from the cache, or else downloaded into it."""

import os
import shutil
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import UserError
from .files import lock
from .paths import cache_folder
from .release import Release


def cached(release: Release) -> Path | None:
    """The release's sdist if it is in the cache, whole and with the right digest."""
    path = cache_folder() / release.sdist_name
    if path.is_file() and sha256(path) == release.sdist_sha256:
        return path
    return None


def fetch(release: Release) -> Path:
    """The release's sdist, downloaded if it is not in the cache.

    A file that is in the cache needs no network. One that is damaged is replaced.

    Raises:
        UserError: no index has it, it cannot be reached or written, or what came has
            another digest; the cache then holds no new file.
    """
    folder = cache_folder()
    target = folder / release.sdist_name
    with lock(folder / f".{release.sdist_name}.lock"):
        if path := cached(release):
            return path
        # Slow to import, and a cached file needs none of it.
        from .download import download

        try:
            # We hold the lock: these are of runs that were killed.
            for stale in folder.glob(f".part-{release.sdist_name}-*"):
                shutil.rmtree(stale)
            if target.exists():
                print(f"{target.name} in the cache is damaged: fetching it again")
            with TemporaryDirectory(
                prefix=f".part-{release.sdist_name}-", dir=folder
            ) as part:
                os.replace(download(release, Path(part)), target)
        except OSError as error:
            raise UserError(
                f"cannot write {target}: {error.strerror}; make room or choose another "
                "folder with OFFLOAD_PARITY_CACHE"
            ) from error
    return target


def sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
