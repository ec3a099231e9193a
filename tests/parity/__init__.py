# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation of vLLM's prefix caching and host offload.

vLLM's own scheduler, KV cache manager, OffloadingConnector and CPU tier run as they
are; only the copy of bytes is replaced. `PYTHONPATH=<vLLM tree>:tests` selects the
release.
"""
