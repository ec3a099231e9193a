# SPDX-License-Identifier: Apache-2.0
"""Fetch, apply, edit and test the patch series of vllm-offload-parity."""

__version__ = "0.1.0"


def version() -> str:
    """This project's name and version."""
    return f"vllm-offload-parity {__version__}"
