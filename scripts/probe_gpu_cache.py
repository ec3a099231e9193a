# SPDX-License-Identifier: Apache-2.0
"""What fits in the GPU and in the host tier: K prompts of N tokens and back.

The prompts are sent forward, then in reverse, the newest first. RUN_SEED keeps repeated
runs apart; by default it is the time.
"""

import click

from offload_parity import cli as scripts
from offload_parity.probes import gpu_cache, plots
from offload_parity.probes.command import (
    address_options,
    check_length,
    open_server,
    output_options,
    report,
    run_seed,
    sending,
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
    with sending(output, meter, maker, run_seed, 2 * prompts) as (bar, done):

        def sent(request: gpu_cache.Request) -> None:
            bar.set_postfix_str(f"{request.seen.tier} {request.seen.cached}")
            done(request)

        requests = gpu_cache.run(meter, maker, tokens, prompts, run_seed, sent)
        found = gpu_cache.summary(requests, meter.totals())
    title = f"{meter.server.model}: {prompts} prompts of {tokens:,} tokens"
    report(
        output, meter, maker, run_seed,
        [r.row() for r in requests], {"summary": found}, gpu_cache.words(found),
        lambda path: plots.gpu_cache(requests, title, path),
    )  # fmt: skip


if __name__ == "__main__":
    scripts.run(cli)
