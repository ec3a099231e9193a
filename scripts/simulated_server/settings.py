# SPDX-License-Identifier: Apache-2.0
"""What the executor is to imitate, handed to vLLM's processes. Needs no vLLM."""

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "OFFLOAD_PARITY_SIMULATED"


@dataclass(frozen=True)
class Settings:
    """One simulated server.

    Attributes:
        profile: a key of ``profiles.PROFILES``.
        mtp: tokens that the drafter proposes per step; 0: there is none.
        gpu_bytes: KV cache of one rank.
        report: a file in which the executor says what vLLM made of it.
        prefill_tokens_per_s: None: at once.
        host_bytes_per_s: of one rank, in each direction. None: at once.
        decode_step_s: a step in which some request samples takes as long.
    """

    profile: str
    mtp: int
    gpu_bytes: int
    report: str
    prefill_tokens_per_s: float | None = None
    host_bytes_per_s: float | None = None
    decode_step_s: float = 0.0

    def to_environment(self) -> dict[str, str]:
        """The variable that ``from_environment`` reads."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "Settings":
        """What the parent process asked for."""
        return cls(**json.loads(os.environ[VARIABLE]))
