# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters, as one reading of ``/metrics``."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from ..errors import UserError

_BYTES = "vllm:kv_offload_total_bytes_total"
# Only a patched server has it, from its series' last patch on.
_LIMITED = "vllm:kv_offload_group_limited_tokens_total"
_REQUESTS = "vllm:request_success_total"
_GPU_HITS = "vllm:prefix_cache_hits_total"
_HOST_HITS = "vllm:external_prefix_cache_hits_total"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_SLEEP = "vllm:engine_sleep_state"
_STARTED = "process_start_time_seconds"
# A page has thousands of samples, most of them of histograms.
_READ = (
    *(_BYTES, _LIMITED, _REQUESTS, _GPU_HITS, _HOST_HITS),
    *(_RUNNING, _WAITING, _SLEEP, _STARTED),
)


@dataclass(frozen=True)
class Counters:
    """One reading; two that are equal say that nothing happened in between.

    Attributes:
        has_vllm: whether there are metrics of vLLM at all.
        started: when the server's process started, to tell replicas apart.
        engines: the engines behind the address.
        asleep: whether an engine says that it sleeps.
        idle: whether no request runs or waits.
        requests: requests that ended.
        gpu_hits, host_hits: prompt tokens found in a tier.
        stored_bytes, loaded_bytes: GPU to host and back; None: no offloading.
        limited: tokens that full attention could have restored, by the name of the
            group that could not; empty also where the server does not count them.
    """

    has_vllm: bool = False
    started: float | None = None
    engines: tuple[str, ...] = ()
    asleep: bool = False
    idle: bool = True
    requests: int = 0
    gpu_hits: int = 0
    host_hits: int = 0
    stored_bytes: int | None = None
    loaded_bytes: int | None = None
    limited: Counter[str] = field(default_factory=Counter)

    @classmethod
    def parse(cls, text: str) -> "Counters":
        """Read the text of ``/metrics``.

        Raises:
            UserError: it is no such text.
        """
        samples = []
        lines = [line for line in text.splitlines() if line.startswith(_READ)]
        try:
            for family in text_string_to_metric_families("\n".join(lines)):
                samples += family.samples
        except ValueError as error:
            raise UserError(
                f"/metrics cannot be read ({error}): is this a vLLM server?"
            ) from error

        def total(name: str, where: Callable[[dict], bool] = lambda _: True) -> int:
            return int(
                sum(s.value for s in samples if s.name == name and where(s.labels))
            )

        def transferred(kind: str) -> int | None:
            if not any(s.name == _BYTES for s in samples):
                return None
            return total(_BYTES, lambda labels: labels.get("transfer_type") == kind)

        limited: Counter[str] = Counter()
        for sample in samples:
            if sample.name == _LIMITED:
                eagle = sample.labels["is_eagle_group"] == "true"
                group = f"group {sample.labels['group_idx']}"
                limited[group + " (EAGLE)" * eagle] += int(sample.value)

        started = [s.value for s in samples if s.name == _STARTED]
        return cls(
            has_vllm=any(s.name == _REQUESTS for s in samples),
            started=started[0] if started else None,
            engines=tuple(
                sorted({s.labels["engine"] for s in samples if "engine" in s.labels})
            ),
            asleep=total(_SLEEP, lambda labels: labels["sleep_state"] != "awake") > 0,
            idle=total(_RUNNING) == 0 and total(_WAITING) == 0,
            requests=total(_REQUESTS),
            gpu_hits=total(_GPU_HITS),
            host_hits=total(_HOST_HITS),
            stored_bytes=transferred("GPU_to_CPU"),
            loaded_bytes=transferred("CPU_to_GPU"),
            limited=limited,
        )


@dataclass(frozen=True)
class Difference:
    """What happened between two readings.

    Attributes:
        requests: requests that ended, anybody's.
        gpu_hits, host_hits: tokens.
        stored_bytes, loaded_bytes: of the host tier.
        limited: tokens, by the group that could not restore them.
    """

    requests: int
    gpu_hits: int
    host_hits: int
    stored_bytes: int
    loaded_bytes: int
    limited: dict[str, int] = field(default_factory=dict)


def difference(before: Counters, after: Counters) -> Difference:
    """What happened from one reading to the next.

    Raises:
        UserError: they are not of one server's one run.
    """
    if before.started != after.started:
        raise UserError(
            "the server was restarted, or several replicas answer at this address: "
            "probe one of them by its own address"
        )
    steps = {
        name: (getattr(after, name) or 0) - (getattr(before, name) or 0)
        for name in Difference.__dataclass_fields__
        if name != "limited"
    }
    limited = Counter(after.limited)
    limited.subtract(before.limited)
    if any(step < 0 for step in (*steps.values(), *limited.values())):
        raise UserError(
            "the server's counters went backwards: it was restarted, or several "
            "replicas answer at this address; probe one of them by its own address"
        )
    return Difference(**steps, limited=dict(+limited))
