# SPDX-License-Identifier: Apache-2.0
"""Faults that the user can mend."""


class UserError(Exception):
    """A foreseeable fault: one line that names the thing and the next step."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
