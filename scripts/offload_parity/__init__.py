# SPDX-License-Identifier: Apache-2.0
"""Fetch, apply, edit and test the patch series of vllm-offload-parity."""
