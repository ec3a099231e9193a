# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: no test waits for a hub that is not there.

vLLM asks the hub for the weights' metadata whenever a test makes a ``ModelConfig``, and
again 2 s after a failure. ``HF_HUB_OFFLINE`` makes the first answer final.
"""

import sys
from types import SimpleNamespace


def pytest_collection_finish():
    """Take the wait between two attempts away; the attempts stay."""
    if module := sys.modules.get("vllm.transformers_utils.repo_utils"):
        module.time = SimpleNamespace(sleep=lambda seconds: None)
