# SPDX-License-Identifier: Apache-2.0
"""Which tests belong to which tree."""

import os
from pathlib import Path

# PARITY_TREE=stock: the tree on PYTHONPATH is a release as published, whose figures are
# known. They are not a patched tree's.
_stock = os.environ.get("PARITY_TREE") == "stock"
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if (path.name == "test_stock_figures.py") != _stock
]
