# SPDX-License-Identifier: Apache-2.0
"""A series as vLLM's maintainers get it: a branch and a text per pull request."""
