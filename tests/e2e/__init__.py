# SPDX-License-Identifier: Apache-2.0
"""Tiny models on vLLM's CPU backend: what the host tier restores is the right data."""
