# SPDX-License-Identifier: Apache-2.0
"""What one request found cached, and in which tier."""

from dataclasses import dataclass

from ..errors import UserError
from .counters import Difference, difference
from .server import Server

# A store of some GB between two looks at the counters, and some more.
_QUIET_S = 0.5

MISS, GPU, HOST, BOTH = "miss", "GPU", "HOST", "GPU+HOST"
TIERS = (GPU, BOTH, HOST, MISS)


@dataclass(frozen=True)
class Seen:
    """One request.

    Attributes:
        tokens: of the input.
        gpu, host: input tokens found in a tier.
        seconds: until the first token, as the client saw it.
        stored_bytes, loaded_bytes: GPU to host and back.
        others: requests of somebody else that ended meanwhile; then the tiers may be
            mixed up.
    """

    tokens: int
    gpu: int
    host: int
    seconds: float
    stored_bytes: int
    loaded_bytes: int
    others: int

    @property
    def cached(self) -> int:
        """Input tokens that were not computed."""
        return self.gpu + self.host

    @property
    def tier(self) -> str:
        """Where they came from."""
        return (MISS, HOST, GPU, BOTH)[2 * bool(self.gpu) + bool(self.host)]


class Meter:
    """Sends one request at a time and reads the counters around it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._first = self._last = server.settled()
        self.others = 0

    def send(self, content: str, tokens: int) -> Seen:
        """Send a prompt that was made for `tokens` tokens.

        Raises:
            UserError: the server counts other tokens, or counts the request nowhere.
        """
        answer = self.server.chat(content)
        if answer.prompt_tokens != tokens:
            raise UserError(
                f"{self.server.url} counts {answer.prompt_tokens} input tokens, its "
                f"/tokenize {tokens}: does something between change the prompt?"
            )
        cached = answer.cached_tokens
        now = self.server.settled(self._last, requests_more=1)
        moved = difference(self._last, now)
        self._last = now
        if moved.requests < 1:
            raise UserError(
                f"{self.server.url}/metrics does not count our request: several "
                "replicas answer at this address; probe one of them by its own address"
            )
        self.others += moved.requests - 1
        host = min(moved.host_hits, cached)
        return Seen(
            tokens=tokens,
            gpu=cached - host,
            host=host,
            seconds=answer.seconds,
            stored_bytes=moved.stored_bytes,
            loaded_bytes=moved.loaded_bytes,
            others=moved.requests - 1,
        )

    def totals(self) -> Difference:
        """What happened since the meter was made, with the stores that came late."""
        return difference(self._first, self.server.settled(quiet_s=_QUIET_S))

    def empty_gpu(self) -> bool:
        """Empty the GPU side once all stores are done; False if it isn't offered."""
        self.server.settled(quiet_s=_QUIET_S)
        if not self.server.empty_gpu():
            return False
        self._last = self.server.settled()
        return True

    def limited(self) -> dict[str, int]:
        """Tokens that full attention had in the host tier, by the group that lacked
        them, since the meter was made; empty where the server does not count them."""
        return difference(self._first, self._last).limited

    def warnings(self) -> list[str]:
        """What the reader must know of the figures."""
        lines = [
            f"{name} lacked {tokens:,} tokens that full attention had in the host tier"
            for name, tokens in self.limited().items()
        ]
        if not self.others:
            return lines
        line = (
            f"{self.others} requests of somebody else ended meanwhile: where they fall "
            "together with ours, tiers and bytes may be mixed up; probe an idle server"
        )
        return [*lines, line]
