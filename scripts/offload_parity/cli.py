# SPDX-License-Identifier: Apache-2.0
"""How every script of this project ends, and what it says to --version."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable

import click

from . import version
from .errors import UserError
from .signals import clean_up_on_termination

_NEXT_STEP = {
    errno.ENOSPC: "make room and run it again",
    errno.EDQUOT: "make room and run it again",
    errno.EROFS: "make it a place that you may write to",
    errno.EACCES: "make it yours to read and write",
}


def _end(status: int, words: str) -> None:
    # Whoever read our output may be gone; the exit status still counts.
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)
    sys.exit(status)


def run(command: click.Command | Callable[[], None]) -> None:
    """Run a script's command; a foreseeable fault is one line on stderr.

    Exit status 1: something is wrong, which the line names; 2: the command line is;
    130: Ctrl-C or termination.
    """
    clean_up_on_termination()
    try:
        if isinstance(command, click.Command):
            if not any("--version" in option.opts for option in command.params):
                # A name of its own: some scripts call their release `version`.
                click.version_option(
                    version(), "--version", "project_version", message="%(version)s"
                )(command)
            command(standalone_mode=False)
        else:
            command()
        sys.stdout.flush()
    except click.UsageError as error:
        _end(2, f"error: {error.format_message()}")
    except click.ClickException as error:
        _end(1, f"error: {error.format_message()}")
    except UserError as error:
        _end(1, f"error: {error}")
    except BrokenPipeError:
        # `… | head`: nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        words = " ".join(f"error: {error}".split())
        if step := _NEXT_STEP.get(error.errno or 0):
            words += f"; {step}"
        _end(1, words)
    except (KeyboardInterrupt, click.Abort):
        _end(130, "interrupted; nothing was left half done")
