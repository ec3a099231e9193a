# SPDX-License-Identifier: Apache-2.0
"""Remove what this project generated; the standard library is enough."""

import argparse
import shutil
import sys
from pathlib import Path

from offload_parity import version
from offload_parity.errors import UserError
from offload_parity.paths import ROOT, build_root, cache_folder

# Both folders can be set to one that holds other things: only our names go.
BUILT = (
    *(".building-*", "vllm-*", "image", "image-stand-in"),
    *("cache", "lint", "port", "reports", "upstream", ".lock"),
)
ENVIRONMENTS = (
    *("unit-env-*", ".unit-env-*.lock", "e2e-env-*", ".e2e-env-*.lock"),
    "pre-commit",
)
CACHED = ("vllm-*.tar.gz", ".part-*", ".vllm-*.lock")


def doomed(everything: bool) -> list[Path]:
    """The paths to remove."""
    places = [(build_root(), BUILT)]
    if everything:
        places += [(build_root(), ENVIRONMENTS), (cache_folder(), CACHED)]
    found = [path for folder, names in places for n in names for path in folder.glob(n)]
    if everything and (ROOT / "build").exists():
        found.append(ROOT / "build")
    return list(dict.fromkeys(found))


def main() -> None:
    """Remove the built trees; with ``--all`` the tools and the downloads too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="tools and downloads too")
    parser.add_argument("--version", action="version", version=version())
    everything = parser.parse_args().all
    try:
        found = doomed(everything)
    except UserError as error:
        sys.exit(f"error: {error}")
    for path in found:
        print(f"removing {path}")
        try:
            if path.is_dir() and not path.is_symlink():
                if path.name.startswith("vllm-"):
                    # Interrupted, no half of a tree is left under its name.
                    path = path.rename(path.with_name(f".building-{path.name}"))
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            sys.exit(f"error: cannot remove {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
