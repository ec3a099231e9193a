# SPDX-License-Identifier: Apache-2.0
"""Where this project keeps things. Standard library only: ``make clean`` uses it."""

import os
from pathlib import Path

from .errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def expanded(path: Path) -> Path:
    """``path`` with a leading ``~`` replaced.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path}: no home folder is known for that: give the whole path"
        ) from error


def _overridable(variable: str, default: Path) -> Path:
    try:
        return expanded(Path(os.environ.get(variable) or default)).resolve()
    except UserError as error:
        raise UserError(f"{error} in {variable}") from error


def patches_root() -> Path:
    """The folder of all series; ``OFFLOAD_PARITY_PATCHES`` overrides it."""
    return _overridable("OFFLOAD_PARITY_PATCHES", ROOT / "patches")


def build_root() -> Path:
    """The folder of all generated files; ``OFFLOAD_PARITY_BUILD`` overrides it."""
    return _overridable("OFFLOAD_PARITY_BUILD", ROOT / "build")


def cache_folder() -> Path:
    """Where downloads are kept; ``OFFLOAD_PARITY_CACHE`` overrides it."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _overridable("OFFLOAD_PARITY_CACHE", Path(caches) / "vllm-offload-parity")


def shown(path: Path) -> str:
    """``path`` as a message shows it: relative to the working directory if inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
