# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible vLLM server, by URL."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import requests
import urllib3
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import ConnectTimeout, ReadTimeout, SSLError
from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

from ..errors import UserError
from .counters import Counters

_METRICS_TIMEOUT_S = 30
# As many seconds as vLLM may take to count a request that it has answered.
_SETTLE_S = 10
# … and for which others may keep it busy after that.
_BUSY_S = 1
_POLL_S = 0.02
_QUOTED = 200


@dataclass(frozen=True)
class Address:
    """Where a server is and how to reach it.

    Attributes:
        url: with or without the trailing "/v1".
        model: None: the one that the server names.
        api_key: sent as a bearer token.
        verify: False, or a file of certificates to trust.
        certificate: a client certificate's file.
        timeout_s: the longest that one answer may take.
        connect_s: the longest that a connection may take.
    """

    url: str = "http://localhost:8000"
    model: str | None = None
    api_key: str | None = None
    verify: bool | str = True
    certificate: str | None = None
    timeout_s: float = 600
    connect_s: float = 10


@dataclass(frozen=True)
class Reply:
    """A whole answer: HTTP status, its words, and the body."""

    status: int
    reason: str
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether it is a good one."""
        return self.status < 400


@dataclass(frozen=True)
class Answer:
    """A chat completion: the server's JSON, and the seconds until it was whole."""

    body: dict[str, Any]
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the input, with the chat template's."""
        return self.body["usage"]["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        """Input tokens that were not computed, from either tier.

        Raises:
            UserError: the server does not say.
        """
        details = self.body["usage"].get("prompt_tokens_details")
        if not details or details.get("cached_tokens") is None:
            raise UserError(
                "the server does not say how many tokens it had cached: start it with "
                "--enable-prompt-tokens-details"
            )
        return details["cached_tokens"]


class Server:
    """One server; every method raises UserError with the next step if it can't."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.url = _base(address.url)
        self._session = requests.Session()
        # With each request: the environment's certificates (REQUESTS_CA_BUNDLE) and
        # logins (.netrc) win over a session's.
        self._options: dict[str, Any] = {
            "verify": address.verify,
            "cert": address.certificate,
            "auth": _bearer(address.api_key),
        }
        if address.verify is False:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

    # --- HTTP ---

    def _call(
        self,
        method: str,
        path: str,
        payload: Any = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send, and read the whole answer; any status is returned.

        Raises:
            UserError: no connection, or no whole answer in time.
        """
        limit = timeout_s or self._address.timeout_s
        deadline = time.monotonic() + limit
        late = UserError(
            f"{self.url}{path}: no whole answer in {limit:g} s: raise --timeout"
        )
        parts = []
        try:
            with self._session.request(
                method,
                f"{self.url}{path}",
                json=payload,
                timeout=(self._address.connect_s, limit),
                stream=True,
                **self._options,
            ) as response:
                # As it comes in: a server that dribbles lets no read time out.
                while part := response.raw.read1(1 << 16, decode_content=True):
                    parts.append(part)
                    if time.monotonic() > deadline:
                        raise late
        except SSLError as error:
            raise UserError(
                f"{self.url}: TLS failed ({_short(error)}): name the certificates with "
                "--ca-file, or leave the check out with --insecure"
            ) from error
        except ConnectTimeout as error:
            raise UserError(
                f"{self.url}: no connection in {self._address.connect_s:g} s: check "
                "the address and the network"
            ) from error
        except (ReadTimeout, ReadTimeoutError) as error:
            raise late from error
        except (ProtocolError, requests.exceptions.ChunkedEncodingError) as error:
            raise UserError(
                f"{self.url}{path}: the answer broke off; look at the server's log"
            ) from error
        except NoConnection as error:
            if isinstance(error.args[0] if error.args else None, ProtocolError):
                raise UserError(
                    f"{self.url}{path}: the connection broke off; look at the "
                    "server's log"
                ) from error
            raise UserError(
                f"{self.url}: no connection ({_short(error)}): is a server running "
                "there? Name it with --url"
            ) from error
        except (requests.RequestException, HTTPError) as error:
            raise UserError(f"{self.url}{path}: {_short(error)}") from error
        return Reply(response.status_code, response.reason, b"".join(parts))

    def _json(self, response: Reply, what: str) -> Any:
        """The body of a good answer.

        Raises:
            UserError: a bad status, or no JSON.
        """
        if response.status in (401, 403):
            raise UserError(
                f"{self.url} refuses the API key ({response.status}): give one "
                "with --api-key or OPENAI_API_KEY"
            )
        if not response.ok:
            raise UserError(
                f"{self.url}: {what} failed with {response.status}: "
                f"{_message(response)}"
            )
        try:
            return json.loads(response.body)
        except ValueError as error:
            raise UserError(
                f"{self.url}: the answer to {what} is no whole JSON "
                f"({response.body[:60]!r}): is this a vLLM server?"
            ) from error

    # --- what the server is ---

    @cached_property
    def model(self) -> str:
        """The model's name: as given, else the only one that is served."""
        return self._model_entry["id"]

    @cached_property
    def _model_entry(self) -> dict[str, Any]:
        listed = self._json(self._call("GET", "/v1/models"), "/v1/models")
        try:
            entries = list(listed["data"])
            names = [entry["id"] for entry in entries]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{self.url}: /v1/models lists no models: is this a vLLM server?"
            ) from error
        if self._address.model:
            entries = [e for e in entries if e["id"] == self._address.model]
            if not entries:
                raise UserError(
                    f"{self.url} does not serve {self._address.model!r}; it serves "
                    f"{', '.join(names)}"
                )
        # An adapter has a parent.
        bases = [entry for entry in entries if not entry.get("parent")] or entries
        if len(bases) != 1:
            raise UserError(
                f"{self.url} serves {', '.join(names) or 'no model'}: choose one with "
                "--model"
            )
        return bases[0]

    @cached_property
    def max_model_len(self) -> int | None:
        """The longest request in tokens, if the server says."""
        return self._model_entry.get("max_model_len")

    @cached_property
    def version(self) -> str | None:
        """vLLM's release, None if the server does not say."""
        response = self._call("GET", "/version")
        if not response.ok:
            return None
        try:
            return str(json.loads(response.body)["version"])
        except (ValueError, KeyError, TypeError):
            return None

    # --- requests ---

    def tokenize(self, content: str) -> list[int]:
        """The tokens of a chat with one user message, as the model gets them."""
        payload = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "add_generation_prompt": True,
        }
        response = self._call("POST", "/tokenize", payload)
        if response.status in (404, 405):
            raise UserError(
                f"{self.url} has no /tokenize: the probes need vLLM's own server, not "
                "a gateway before it"
            )
        body = self._json(response, "/tokenize")
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list):
            raise UserError(f"{self.url}: /tokenize returned no tokens")
        return tokens

    def chat(self, content: str, max_tokens: int = 1) -> Answer:
        """One completion of one user message, greedy."""
        payload = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        began = time.monotonic()
        response = self._call("POST", "/v1/chat/completions", payload)
        seconds = time.monotonic() - began
        body = self._json(response, "a chat completion")
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict) or "prompt_tokens" not in usage:
            raise UserError(
                f"{self.url}: the completion says nothing of its usage: is this vLLM's "
                "own server?"
            )
        return Answer(body, seconds)

    # --- metrics ---

    def counters(self) -> Counters:
        """The counters now."""
        response = self._call("GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
        if not response.ok:
            raise UserError(
                f"{self.url}/metrics answers {response.status}: the probes read "
                "vLLM's metrics; ask the server itself, not a gateway before it"
            )
        found = Counters.parse(response.body.decode("utf-8", errors="replace"))
        if not found.has_vllm:
            raise UserError(
                f"{self.url}/metrics has no metrics of vLLM: start the server without "
                "--disable-log-stats"
            )
        return found

    def settled(
        self,
        after: Counters | None = None,
        requests_more: int = 0,
        quiet_s: float = 0,
    ) -> Counters:
        """The counters once they stand still.

        Args:
            after: they must have moved past these …
            requests_more: … by as many requests. vLLM counts a request shortly after it
                has answered, and stores its blocks in the next step.
            quiet_s: how long they must stand still.

        If they do not come that far in time, or others keep the server busy, they are
        returned as they are.
        """
        began = since = time.monotonic()
        moved_at = None
        last = self.counters()
        while (now_s := time.monotonic()) - began < _SETTLE_S + quiet_s:
            if moved_at is not None and now_s - moved_at > _BUSY_S + quiet_s:
                break
            time.sleep(_POLL_S)
            now = self.counters()
            moved = after is None or now.requests - after.requests >= requests_more
            if moved and moved_at is None:
                moved_at = now_s
            if not (moved and now.idle and now == last):
                since = time.monotonic()
            elif time.monotonic() - since >= quiet_s:
                return now
            last = now
        return last

    def check_suitable(self) -> Counters:
        """Refuse a server whose tiers cannot be told apart; the counters now.

        Raises:
            UserError: it sleeps, has several engines, or has no offloading.
        """
        now = self.counters()
        if now.asleep:
            raise UserError(f"{self.url} sleeps: wake it up (POST /wake_up)")
        if len(now.engines) > 1:
            raise UserError(
                f"{self.url} has {len(now.engines)} engines "
                f"({', '.join(now.engines)}), each with a "
                "cache of its own: probe a server with one (--data-parallel-size 1)"
            )
        if now.stored_bytes is None:
            raise UserError(
                f"{self.url} has no offloading configured (no "
                "vllm:kv_offload_total_bytes_total): start it with --kv-offloading-size"
            )
        return now

    def empty_gpu(self) -> bool:
        """Empty the GPU prefix cache only; False where the server does not offer it.

        It does in its development mode (VLLM_SERVER_DEV_MODE=1).
        """
        response = self._call("POST", "/reset_prefix_cache")
        if response.status in (401, 403, 404, 405):
            return False
        if not response.ok:
            raise UserError(
                f"{self.url}: /reset_prefix_cache failed with {response.status}: "
                f"{_message(response)}"
            )
        return True


def _base(url: str) -> str:
    """The address without the trailing "/v1", with a scheme.

    Raises:
        UserError: it is none.
    """
    base = url.strip() if "://" in url else f"http://{url.strip()}"
    base = base.rstrip("/").removesuffix("/v1")
    try:
        parsed = urllib3.util.parse_url(base)
    except HTTPError:
        parsed = urllib3.util.Url()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(
            f"{url!r} is no address of a server: give --url http://host:port"
        )
    return base


def _bearer(key: str | None) -> Callable[[Any], Any]:
    """What adds the key to a request, or nothing.

    Raises:
        UserError: no header can hold it.
    """
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(
            "the API key has a character that no HTTP header can hold: check what "
            "was pasted into --api-key or OPENAI_API_KEY"
        )

    def add(request: Any) -> Any:
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    return add


def _message(response: Reply) -> str:
    """What a server says of an error, shortened."""
    try:
        body = json.loads(response.body)
        said = body.get("error", body)
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        said = response.body.decode("utf-8", errors="replace") or response.reason
    return " ".join(str(said).split())[:_QUOTED]


def _short(error: Exception) -> str:
    """The innermost reason of a library's error."""
    reason = getattr(error.args[0] if error.args else None, "reason", None) or error
    text = str(reason).rsplit(": ", 1)[-1]
    return " ".join(text.split())[:_QUOTED].strip("'()")
