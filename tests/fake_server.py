# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server, with a host tier of its own rules and with faults."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OVERHEAD = (2, 2)
BLOCK_BYTES = 1000


class FakeServer:
    """The state; tests change its attributes between requests.

    Attributes:
        one_token: whether a word is one token.
        align: a hit ends at a multiple of it, and not at the prompt's end.
        gpu_prompts: how many prompts the GPU side holds.
        host_hit: what of a hit the host restores, by prompt length.
        faults: path to a function that answers in place of the server.
        engines: labels in the metrics.
        extra_requests: requests of others, per request of ours.
        unseen: tokens that a request has and /tokenize does not show.
        others_running: requests of others that never end.
        limited: what a patched server counts, by group index and whether EAGLE's.
    """

    def __init__(self) -> None:
        self.url = ""
        self.version = "0.33.0"
        self.models = [{"id": "fake", "max_model_len": 65_536}]
        self.one_token: Callable[[str], bool] = lambda word: True
        self.align = 256
        self.gpu_prompts = 3
        self.host_hit: Callable[[int, int], int] = lambda length, hit: hit
        self.dev_mode = True
        self.details = True
        self.offload = True
        self.metrics = True
        self.asleep = False
        self.engines = ("0",)
        self.extra_requests = 0
        self.others_running = 0
        self.unseen = 0
        self.started = 1.0
        self.faults: dict[str, Callable[[Any], None]] = {}
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.requests = self.gpu_hits = self.host_hits = 0
        self.stored = self.loaded = 0
        self.limited: dict[tuple[str, str], int] = {}
        self._gpu: list[tuple[str, ...]] = []
        self._host: list[tuple[str, ...]] = []

    def tokens(self, content: str) -> list[str]:
        """As many as the template and the words make."""
        words: list[str] = []
        for word in content.split():
            words += [word] if self.one_token(word) else [word, "'"]
        return ["<s>", "<user>", *words, "</s>", "<assistant>"]

    def _best(self, prompts: list[tuple[str, ...]], tokens: tuple[str, ...]) -> int:
        best = 0
        for other in prompts:
            same = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(other, tokens, strict=False))
                    if a != b
                ),
                min(len(other), len(tokens)),
            )
            best = max(best, min(same, len(tokens) - 1) // self.align * self.align)
        return best

    def chat(self, content: str) -> dict[str, Any]:
        """Count what is cached where, then keep the prompt in both tiers."""
        tokens = (*["<system>"] * self.unseen, *self.tokens(content))
        gpu = self._best(self._gpu, tokens)
        host = self.host_hit(len(tokens), self._best(self._host, tokens))
        host = max(host - gpu, 0)
        self.gpu_hits += gpu
        self.host_hits += host
        self.loaded += host * BLOCK_BYTES
        self.stored += 0 if tokens in self._host else len(tokens) * BLOCK_BYTES
        if tokens in self._gpu:
            self._gpu.remove(tokens)
        self._gpu.append(tokens)
        self._host.append(tokens)
        del self._gpu[: -self.gpu_prompts]
        self.requests += 1 + self.extra_requests
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        usage["prompt_tokens_details"] = (
            {"cached_tokens": gpu + host} if self.details else None
        )
        choice = {"index": 0, "message": {"role": "assistant", "content": " a"}}
        return {"id": "x", "model": "fake", "choices": [choice], "usage": usage}

    def empty_gpu(self) -> None:
        """Forget what the GPU side holds."""
        self._gpu.clear()

    def page(self) -> str:
        """The text of /metrics."""
        lines = [f"process_start_time_seconds {self.started}"]
        if self.metrics:
            for engine in self.engines:
                label = f'engine="{engine}",model_name="fake"'
                share = engine == self.engines[0]
                for name, more, value in (
                    (
                        "request_success_total",
                        ',finished_reason="length"',
                        self.requests,
                    ),
                    ("prefix_cache_hits_total", "", self.gpu_hits),
                    ("external_prefix_cache_hits_total", "", self.host_hits),
                    ("num_requests_running", "", self.others_running),
                    ("num_requests_waiting", "", 0),
                    ("engine_sleep_state", ',sleep_state="awake"', not self.asleep),
                    ("engine_sleep_state", ',sleep_state="discard_all"', self.asleep),
                ):
                    lines.append(f"vllm:{name}{{{label}{more}}} {float(value * share)}")
                if self.offload:
                    for kind, value in (
                        ("GPU_to_CPU", self.stored),
                        ("CPU_to_GPU", self.loaded),
                    ):
                        lines.append(
                            "vllm:kv_offload_total_bytes_total"
                            f'{{{label},transfer_type="{kind}"}} {float(value)}'
                        )
                for (group, eagle), value in self.limited.items():
                    lines.append(
                        "vllm:kv_offload_group_limited_tokens_total"
                        f'{{{label},group_idx="{group}",is_eagle_group="{eagle}"}} '
                        f"{float(value * share)}"
                    )
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two packets; the second would wait for the first one's ack.
    disable_nagle_algorithm = True
    fake: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def reply(self, body: Any, status: int = 200) -> None:
        """Send JSON, or text as it is."""
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self._serve(json.loads(self.rfile.read(size) or b"{}"))

    def _serve(self, payload: dict[str, Any]) -> None:
        fake = self.fake
        fake.headers.append(dict(self.headers))
        if fault := fake.faults.get(self.path):
            fault(self)
            return
        if self.path == "/v1/models":
            self.reply({"object": "list", "data": fake.models})
        elif self.path == "/version":
            self.reply({"version": fake.version})
        elif self.path == "/metrics":
            self.reply(fake.page())
        elif self.path == "/tokenize":
            names = fake.tokens(payload["messages"][0]["content"])
            self.reply({"tokens": [hash(n) for n in names], "count": len(names)})
        elif self.path == "/v1/chat/completions":
            fake.seen.append(payload)
            self.reply(fake.chat(payload["messages"][0]["content"]))
        elif self.path == "/reset_prefix_cache" and fake.dev_mode:
            fake.empty_gpu()
            self.reply("")
        else:
            self.reply({"detail": "Not Found"}, 404)


@contextmanager
def running() -> Iterator[FakeServer]:
    """A fake server that answers."""
    fake = FakeServer()
    handler = type("Handler", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def error(status: int, body: Any) -> Callable[[Any], None]:
    """A fault: this status and body."""
    return lambda handler: handler.reply(body, status)


def truncated(handler: Any) -> None:
    """A fault: the connection breaks in the middle of the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": "x", ')
    handler.close_connection = True


def half_json(handler: Any) -> None:
    """A fault: a whole answer that is half a JSON."""
    handler.reply('{"id": "x", "usage": {"prompt_tok')


def dribble(handler: Any) -> None:
    """A fault: a byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    try:
        for _ in range(300):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        handler.close_connection = True
