# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and termination at moments of our choosing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt


def clean_up_on_termination() -> None:
    """Make a termination end the program like Ctrl-C, so that it cleans up."""
    for number in _SIGNALS:
        # Left alone if the caller ignores it, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block, and the programs it starts, end before a signal takes effect."""
    # A blocked signal waits; children inherit the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
