# SPDX-License-Identifier: Apache-2.0
"""What fits in the GPU and in the host tier: K prompts of N tokens and back.

The prompts are sent forward, then in reverse, the newest first. RUN_SEED keeps repeated
runs apart; by default it is the time.
"""

import click

from offload_parity import cli as scripts
from offload_parity.probes import gpu_cache
from offload_parity.probes.command import (
    about,
    address_options,
    check_length,
    check_output,
    heading,
    open_server,
    output_options,
    progress,
    run_seed,
    show,
)


@click.command(help=__doc__)
@click.argument("tokens", metavar="[N]", type=click.IntRange(1), default=49_000)
@click.argument("prompts", metavar="[K]", type=click.IntRange(1), default=100)
@run_seed(metavar="[RUN_SEED]")
@output_options
@address_options
def cli(address, tokens, prompts, run_seed, as_json, as_csv, plot) -> None:
    """Measure and print."""
    check_output(as_json, as_csv, plot)
    meter, maker = open_server(address)
    check_length(meter, tokens)
    with progress(2 * prompts, "requests") as bar:

        def done(request: gpu_cache.Request) -> None:
            bar.set_postfix_str(f"{request.seen.tier} {request.seen.cached}")
            bar.update()

        requests = gpu_cache.run(meter, maker, tokens, prompts, run_seed, done)
    found = gpu_cache.summary(requests, meter.totals())
    lines = [*heading(meter, maker, run_seed), *gpu_cache.words(found)]
    lines += meter.warnings()
    facts = about(meter, maker, run_seed) | {"summary": found}
    show([r.row() for r in requests], facts, lines, as_json, as_csv)
    if plot is not None:
        from offload_parity.probes import plots

        title = f"{meter.server.model}: {prompts} prompts of {tokens:,} tokens"
        plots.gpu_cache(requests, title, plot)


if __name__ == "__main__":
    scripts.run(cli)
