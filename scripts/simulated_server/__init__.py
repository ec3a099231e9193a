# SPDX-License-Identifier: Apache-2.0
"""vLLM's real API server, engine, scheduler and offloading connector with no GPU.

``profiles`` says what the models' caches look like and needs no vLLM; the rest runs in
the environment of vLLM's unit tests with a vLLM tree on ``PYTHONPATH``.
"""
