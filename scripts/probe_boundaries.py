# SPDX-License-Identifier: Apache-2.0
"""Does offload really restore? Resends prompts of all lengths across one block.

Prompts are sent, pushed out of the GPU, and sent again: a length at which the resend
restores nothing, or less than a shorter one, is the silent kind of fault. In the
server's development mode (VLLM_SERVER_DEV_MODE=1) the GPU side is emptied, otherwise
other prompts push them out. Ends with OK (exit status 0), AFFECTED (3), UNKNOWN (4).
"""

import sys

import click

from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity.errors import UserError
from offload_parity.probes import boundaries as probe
from offload_parity.probes import plots
from offload_parity.probes.command import (
    address_options,
    check_length,
    open_server,
    output_options,
    progress,
    report,
    run_seed,
    sending,
)

_STATUS = {"OK": 0, "AFFECTED": 3, "UNKNOWN": 4}


def remedy(version: str | None) -> str:
    """What this project has for a release."""
    supported = releases.supported()
    plain = (version or "").split("+")[0].removeprefix("v")
    if any(release.version == plain for release in supported):
        return (
            f"this project has a series for {plain}: make apply "
            "PYTHON=<your server's python>, restart the server and probe again"
        )
    named = f"vLLM {plain}" if plain else "a server that names no version"
    return (
        f"this project has no series for {named}, only for "
        f"{releases.names(supported)}: upgrade to one of them"
    )


@click.command(help=__doc__)
@run_seed(metavar="[RUN_SEED]")
@click.option("--align", type=click.IntRange(1),
              help="Tokens across which to try; default: hits' alignment.")  # fmt: skip
@click.option("--around", type=click.IntRange(2),
              help="The boundary in the middle; default: one past 2,048.")  # fmt: skip
@click.option("--step", type=click.IntRange(1),
              help="Tokens between lengths; default: for about 32.")  # fmt: skip
@click.option("--filler", type=click.IntRange(1), default=16_384, show_default=True,
              help="Tokens of a prompt that pushes others out.")  # fmt: skip
@click.option("--fillers", type=click.IntRange(1), default=512, show_default=True,
              help="How many of them may be sent.")  # fmt: skip
@output_options
@address_options
def cli(address, run_seed, align, around, step, filler, fillers, output) -> None:
    """Measure, print, and say the verdict."""
    meter, maker = open_server(address)
    with progress(0, "requests") as bar:
        measured = probe.alignment(meter, maker, run_seed, bar.set_postfix_str)
    align = align or measured
    if align % measured:
        raise UserError(
            f"--align {align}: hits of this server are aligned to {measured:,} tokens; "
            "give a multiple of that, or leave it out"
        )
    tried = probe.lengths(align, around, step)
    check_length(meter.server, tried[-1])
    most = meter.server.max_model_len
    filler = min(filler, most - 1) if most else filler
    with sending(output, meter, maker, run_seed, 2 * len(tried), probe.judge) as (
        bar,
        done,
    ):
        points = probe.run(
            meter, maker, tried, run_seed, done, filler, fillers, bar.set_postfix_str
        )
    word, words = probe.verdict(points)
    version = meter.server.version
    title = f"{meter.server.model}, vLLM {version}: {word}"
    report(
        output, meter, maker, run_seed,
        [p.row() for p in points], {"verdict": word, "alignment": measured}, words,
        lambda path: plots.boundaries(points, title, path),
        [
            *([remedy(version)] if word == "AFFECTED" else []),
            f"{word}: hits are aligned to {measured} tokens",
        ],
    )  # fmt: skip
    sys.exit(_STATUS[word])


if __name__ == "__main__":
    scripts.run(cli)
