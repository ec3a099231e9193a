# SPDX-License-Identifier: Apache-2.0
"""What the probe scripts share: one module per concern, nothing of vLLM imported."""
