# SPDX-License-Identifier: Apache-2.0
"""Where this project keeps things. Standard library only: ``make clean`` uses it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _overridable(variable: str, default: Path) -> Path:
    return Path(os.environ.get(variable) or default).expanduser().resolve()


def patches_root() -> Path:
    """The folder of all series; ``OFFLOAD_PARITY_PATCHES`` overrides it."""
    return _overridable("OFFLOAD_PARITY_PATCHES", ROOT / "patches")


def build_root() -> Path:
    """The folder of all generated files; ``OFFLOAD_PARITY_BUILD`` overrides it."""
    return _overridable("OFFLOAD_PARITY_BUILD", ROOT / "build")


def cache_folder() -> Path:
    """Where downloads are kept; ``OFFLOAD_PARITY_CACHE`` overrides it."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _overridable("OFFLOAD_PARITY_CACHE", Path(caches) / "vllm-offload-parity")


def shown(path: Path) -> str:
    """``path`` as a message shows it: relative to the working directory if inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
