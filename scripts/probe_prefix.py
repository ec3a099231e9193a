# SPDX-License-Identifier: Apache-2.0
"""Which of several prompts with a shared prefix (AB, AC, AD, …) first hits it?

Once with the GPU cache kept and, where the server's development mode allows it, once
with it emptied after each, so that only the host tier can serve.
"""

import click

from offload_parity import cli as scripts
from offload_parity.probes import plots
from offload_parity.probes import prefix as probe
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
@run_seed(metavar="[RUN_SEED]")
@click.option("--prefix", type=click.IntRange(1), default=20_000, show_default=True,
              help="Input tokens that all share, with the template's.")  # fmt: skip
@click.option("--own", type=click.IntRange(1), default=3_000, show_default=True,
              help="Input tokens of each one's own.")  # fmt: skip
@click.option("--siblings", type=click.IntRange(2), default=4, show_default=True)
@output_options
@address_options
def cli(address, run_seed, prefix, own, siblings, output) -> None:
    """Measure and print."""
    meter, maker = open_server(address)
    check_length(meter.server, prefix + own)
    with sending(output, meter, maker, run_seed, 2 * siblings) as (_, done):
        found = probe.run(meter, maker, prefix, own, siblings, run_seed, done)
    title = f"{meter.server.model}: {prefix:,} shared + {own:,} own tokens"
    report(
        output, meter, maker, run_seed,
        [s.row() for s in found], {"prefix": prefix}, probe.words(found, prefix),
        lambda path: plots.prefix(found, prefix, title, path),
    )  # fmt: skip


if __name__ == "__main__":
    scripts.run(cli)
