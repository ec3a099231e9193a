# SPDX-License-Identifier: Apache-2.0
"""Who submits: the name and address that sign the commits off."""

import re
from dataclasses import dataclass

from .. import git
from ..errors import UserError
from ..paths import ROOT

# Names that no mail reaches (RFC 2606, 6761).
_RESERVED = re.compile(
    r"[@.](invalid|example|localhost|localdomain|test|example\.(com|net|org))$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+$")


@dataclass(frozen=True)
class Submitter:
    """The identity that git has for the user."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"

    @property
    def reachable(self) -> bool:
        """Whether the address can belong to somebody."""
        return not _RESERVED.search(self.email)


def submitter(repo: git.Repo | None = None) -> Submitter:
    """The identity in the user's own git settings; git's guesses do not count.

    Raises:
        UserError: there is none, or one that no commit can be signed off with.
    """
    repo = repo or git.Repo(ROOT)
    done = repo.run(
        "-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT", check=False
    )
    said = done.stdout.decode(errors="replace")
    found = re.fullmatch(r"(.+) <(.*)> \S+ \S+\n?", said)
    if found and ("\N{REPLACEMENT CHARACTER}" in said or not _ADDRESS.match(found[2])):
        raise UserError(
            f"git knows you as {found[1]} <{found[2]}>, and you sign the commits off: "
            "mend user.name (UTF-8) and user.email (you@your.domain) in its settings"
        )
    if done.returncode or not found:
        raise UserError(
            "git does not know who you are, and you sign the commits off: git config "
            '--global user.name "Your Name" and user.email you@your.domain'
        )
    return Submitter(found[1], found[2])
