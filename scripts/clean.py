# SPDX-License-Identifier: Apache-2.0
"""Remove what this project generated; the standard library is enough."""

import argparse
import shutil
import sys
from pathlib import Path

from offload_parity.paths import ROOT, build_root, cache_folder

# Both folders can be set to one that holds other things: only our names go.
BUILT = ("vllm-*", ".building-*", "cache", "lint", "reports", ".lock")
ENVIRONMENTS = ("unit-env-*", ".unit-env-*.lock", "pre-commit")
CACHED = ("vllm-*.tar.gz", ".part-*", ".vllm-*.lock")


def doomed(everything: bool) -> list[Path]:
    """The paths to remove."""
    places = [(build_root(), BUILT)]
    if everything:
        places += [(build_root(), ENVIRONMENTS), (cache_folder(), CACHED)]
    found = [path for folder, names in places for n in names for path in folder.glob(n)]
    if everything and (ROOT / "build").exists():
        found = [path for path in found if ROOT / "build" not in path.parents]
        found.append(ROOT / "build")
    return found


def main() -> None:
    """Remove the built trees; with ``--all`` the tools and the downloads too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="tools and downloads too")
    for path in doomed(parser.parse_args().all):
        print(f"removing {path}")
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            sys.exit(f"error: cannot remove {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
