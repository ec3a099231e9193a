# SPDX-License-Identifier: Apache-2.0
"""Thin functions over git. Nothing in here knows about vLLM or the series."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from .errors import UserError
from .signals import uninterrupted

# Settings of the caller that would redirect git to another repository (as inside a
# hook) or change what it writes are dropped; who commits and how to reach a server
# stay.
_KEPT = ("GIT_SSL_", "GIT_SSH", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "GIT_EXEC")

# Whatever the user's configuration says, no hook or other program runs, and output
# and patches keep one form.
NEUTRAL = (
    "-c", f"core.hooksPath={os.devnull}",
    "-c", "core.fsmonitor=false",
    "-c", "core.quotePath=false",
    "-c", "commit.gpgSign=false",
    "-c", "am.threeWay=true",
    "-c", "am.messageid=false",
    "-c", "mailinfo.scissors=false",
    "-c", "apply.whitespace=nowarn",
    "-c", "apply.ignoreWhitespace=no",
    "-c", "i18n.commitEncoding=UTF-8",
    "-c", "i18n.logOutputEncoding=UTF-8",
    "-c", "merge.renames=true",
    "-c", "merge.conflictStyle=merge",
    "-c", "rerere.enabled=false",
    "-c", "log.showSignature=false",
    "-c", "advice.detachedHead=false",
    "-c", "gc.auto=0",
    "-c", "submodule.recurse=false",
    "-c", "notes.rewriteRef=",
    "-c", "diff.suppressBlankEmpty=false",
    "-c", "log.follow=false",
)  # fmt: skip

# The form of a diff, with everything stated that a configuration could change.
DIFF = (
    "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color",
    "--diff-algorithm=histogram", "--indent-heuristic", "-U3",
    "--inter-hunk-context=0", "-O/dev/null", "--no-relative",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip

# What the folder of a temporary work tree is called.
TEMPORARY = "offload-parity-"

_IN_PROGRESS = {
    "rebase-apply": "git am or rebase",
    "rebase-merge": "rebase",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "sequencer": "cherry-pick or revert",
    "BISECT_LOG": "bisect",
}


# For work trees of our own: files are as in the commits, byte for byte.
_EXACT = (
    "-c", "core.autocrlf=false",
    "-c", "core.eol=lf",
    "-c", f"core.attributesFile={os.devnull}",
)  # fmt: skip


_FAULT = re.compile("fatal:|error:")


class GitError(UserError):
    """A git command that failed where no failure was foreseen."""

    def __init__(self, args: tuple[str, ...], stderr: str) -> None:
        lines = stderr.strip().splitlines() or ["no message"]
        faults = (n for n, line in enumerate(lines) if _FAULT.match(line))
        first = next(faults, len(lines) - 1)
        told = lines[first]
        # The path that it is about may follow, indented.
        if lines[first + 1 : first + 2] and lines[first + 1].startswith("\t"):
            told += lines[first + 1]
        while args[0] == "-c":
            args = args[2:]
        super().__init__(f"git {args[0]} failed: {told}")
        self.stderr = stderr


def environment(*, isolated: bool = False) -> dict[str, str]:
    """The environment for git; ``isolated`` shuts out every user and system setting."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key.startswith(_KEPT)
    }
    env |= {
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_EDITOR": "true",
        # Looking at a tree writes nothing, not even a refreshed index.
        "GIT_OPTIONAL_LOCKS": "0",
    }
    if isolated:
        env |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "TZ": "UTC",
        }
    return env


class Repo:
    """A work tree.

    ``isolated``: the user's and the system's settings are ignored. ``exact``: line ends
    are never converted, for a work tree of our own. ``who``: the (name, e-mail) that
    commits; None leaves it to git.
    """

    def __init__(
        self,
        path: Path,
        *,
        isolated: bool = False,
        exact: bool = False,
        who: tuple[str, str] | None = None,
    ) -> None:
        self.path = path
        self.isolated = isolated
        self.exact = exact
        self.who = who

    def at(self, path: Path) -> "Repo":
        """The same settings for another work tree, one of our own."""
        return Repo(path, isolated=self.isolated, exact=True, who=self.who)

    def run(
        self,
        *args: str,
        check: bool = True,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``git *args``.

        Raises:
            GitError: it failed and ``check`` is set.
            UserError: there is no git.
        """
        variables = environment(isolated=self.isolated)
        # A damaged repository is an error, never the one that encloses it.
        variables["GIT_CEILING_DIRECTORIES"] = str(self.path.resolve().parent)
        if self.who:
            for role in ("AUTHOR", "COMMITTER"):
                variables[f"GIT_{role}_NAME"], variables[f"GIT_{role}_EMAIL"] = self.who
        # A tree of ours may belong to another user, as in a container.
        exact = _EXACT if self.exact else ()
        trust = ("-c", f"safe.directory={self.path}") if self.isolated else ()
        try:
            done = subprocess.run(
                ("git", *NEUTRAL, *exact, *trust, *args),
                cwd=self.path,
                env=variables | dict(env or {}),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            if not self.path.is_dir():
                raise UserError(f"{self.path}: no such folder") from error
            raise UserError("git is not installed: install git 2.32+") from error
        if check and done.returncode:
            raise GitError(args, (done.stderr or done.stdout).decode(errors="replace"))
        return done

    def out(self, *args: str, **options) -> str:
        """The output of ``git *args`` without its last newline."""
        return self.run(*args, **options).stdout.decode("utf-8", "surrogateescape")[:-1]

    def lines(self, *args: str, **options) -> list[str]:
        """The output lines of ``git *args``."""
        return self.out(*args, **options).splitlines()

    def ok(self, *args: str) -> bool:
        """Whether ``git *args`` succeeds."""
        return self.run(*args, check=False).returncode == 0

    def commit_id(self, revision: str) -> str | None:
        """The full id of a commit, None if there is no such revision."""
        done = self.run(
            "rev-parse", "-q", "--verify", f"{revision}^{{commit}}", check=False
        )
        return None if done.returncode else done.stdout.decode().strip()

    def branch(self) -> str | None:
        """The branch that is checked out, None when HEAD is detached."""
        done = self.run("symbolic-ref", "-q", "--short", "HEAD", check=False)
        return None if done.returncode else done.stdout.decode().strip()

    def changes(self, *, untracked: bool) -> list[str]:
        """Paths that differ from HEAD or from the index."""
        mode = "normal" if untracked else "no"
        status = self.out(
            "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=all",
            f"--untracked-files={mode}",
        )  # fmt: skip
        return [entry[3:] for entry in status.split("\0") if entry[2:3] == " "]

    def git_path(self, name: str) -> Path:
        """Where the repository keeps ``name`` for this work tree."""
        return self.path / self.out("rev-parse", "--git-path", name)

    def in_progress(self) -> str | None:
        """What of several steps has been begun here and not ended, such as a rebase."""
        for name, what in _IN_PROGRESS.items():
            if self.git_path(name).exists():
                return what
        return None

    def blobs(self, revision: str, paths: Iterable[str]) -> dict[str, str]:
        """The blob id of each of ``paths`` that exists in ``revision``."""
        found = {}
        listing = self.out(
            "--literal-pathspecs", "ls-tree", "-r", "-z", "--full-tree", revision, "--",
            *paths,
        )  # fmt: skip
        # out() dropped the last NUL
        for entry in filter(None, listing.split("\0")):
            meta, path = entry.split("\t", 1)
            found[path] = meta.split()[2]
        return found

    def content(self, revision: str, path: str) -> bytes | None:
        """A file's content in ``revision``, None if it is not there."""
        done = self.run("cat-file", "blob", f"{revision}:{path}", check=False)
        return None if done.returncode else done.stdout

    @contextmanager
    def worktree(self, revision: str) -> Iterator["Repo"]:
        """A temporary detached work tree at ``revision``; gone afterwards.

        It lies in the system's temporary folder, and nothing of it stays behind in
        the repository when the block is left, by an error or Ctrl-C as well.
        """
        with TemporaryDirectory(prefix=TEMPORARY) as folder:
            path = Path(folder).resolve() / "tree"
            add = ("worktree", "add", "-q", "--detach", str(path), revision)
            try:
                self.run(*(_EXACT + add))
                yield self.at(path)
            finally:
                remove = ("worktree", "remove", "--force", str(path))
                with uninterrupted():
                    if self.run(*remove, check=False).returncode:
                        # A child of an interrupted git may still have written to it.
                        shutil.rmtree(path, ignore_errors=True)
                        self.run(*remove, check=False)


def add_blobs(repo: Repo, contents: Iterable[bytes]) -> None:
    """Make the contents of files known to a repository, in no commit."""
    for data in contents:
        repo.run("hash-object", "-w", "--no-filters", "--stdin", stdin=data)


def unmerged(tree: Repo) -> list[str]:
    """The files that a merge left in conflict."""
    listing = tree.out("diff", "--name-only", "--diff-filter=U", "-z", *DIFF)
    return [path for path in listing.split("\0") if path]


def am(tree: Repo, patch: Path) -> subprocess.CompletedProcess[bytes]:
    """Apply one mail-format patch as a commit whose id depends on nothing else.

    The result is for the caller to judge: on failure the ``am`` is still in progress.
    """
    return tree.run(
        "am", "-q", "--3way", "--keep-cr", "--keep-non-patch", "--no-scissors",
        "--no-gpg-sign", "--committer-date-is-author-date", "--whitespace=nowarn",
        str(patch),
        check=False,
    )  # fmt: skip
