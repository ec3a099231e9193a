# SPDX-License-Identifier: Apache-2.0
"""The laws' names. Needs no vLLM."""

NAMES = {
    "L1": "replay",
    "L2": "extension",
    "L3": "siblings",
    "L4": "edit near the end",
    "L5": "safety",
    "L6": "never worse than stock, nothing else stored",
    "L7": "nothing useless",
    "L8": "mixed tiers",
}
