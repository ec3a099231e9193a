# SPDX-License-Identifier: Apache-2.0
"""What fits in the GPU and in the host tier: K prompts of N tokens and back.

The prompts are sent forward, then in reverse, the newest first. RUN_SEED keeps repeated
runs apart; by default it is the time.
"""

from typing import Any

import click

from offload_parity import cli as scripts
from offload_parity.probes import gpu_cache, plots
from offload_parity.probes.command import (
    address_options,
    check_length,
    open_server,
    output_options,
    progress,
    report,
    run_seed,
    unfinished,
)


@click.command(help=__doc__)
@click.argument("tokens", metavar="[N]", type=click.IntRange(1), default=49_000)
@click.argument("prompts", metavar="[K]", type=click.IntRange(1), default=100)
@run_seed(metavar="[RUN_SEED]")
@output_options
@address_options
def cli(address, tokens, prompts, run_seed, output) -> None:
    """Measure and print."""
    meter, maker = open_server(address)
    check_length(meter.server, tokens)
    rows: list[dict[str, Any]] = []
    with (
        unfinished(output, meter, maker, run_seed, lambda: rows),
        progress(2 * prompts, "requests") as bar,
    ):

        def done(request: gpu_cache.Request) -> None:
            rows.append(request.row())
            bar.set_postfix_str(f"{request.seen.tier} {request.seen.cached}")
            bar.update()

        requests = gpu_cache.run(meter, maker, tokens, prompts, run_seed, done)
        found = gpu_cache.summary(requests, meter.totals())
    title = f"{meter.server.model}: {prompts} prompts of {tokens:,} tokens"
    report(
        output, meter, maker, run_seed,
        rows, {"summary": found}, gpu_cache.words(found),
        lambda path: plots.gpu_cache(requests, title, path),
    )  # fmt: skip


if __name__ == "__main__":
    scripts.run(cli)
