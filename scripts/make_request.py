# SPDX-License-Identifier: Apache-2.0
"""Send one chat completion of exactly N input tokens; SEED sets the content.

Prints the server's JSON. The same seed makes the same prompt; other seeds share nothing
with it but the chat template, and the prefix if one is given.
"""

import json

import click

from offload_parity import cli as scripts
from offload_parity.probes.command import address_options, check_length
from offload_parity.probes.prompts import PromptMaker
from offload_parity.probes.server import Server


@click.command(help=__doc__)
@click.argument("tokens", metavar="N", type=click.IntRange(1))
@click.argument("seed", metavar="SEED")
@click.option("--prefix", type=click.IntRange(0), default=0, show_default=True,
              help="Input tokens, from the first, that its seed sets.")  # fmt: skip
@click.option("--prefix-seed", help="Its seed; needs --prefix.")
@click.option("--max-tokens", type=click.IntRange(1), default=1, show_default=True,
              help="Tokens to generate.")  # fmt: skip
@address_options
def cli(address, tokens, seed, prefix, prefix_seed, max_tokens) -> None:
    """Make the prompt, check its length and send it."""
    if bool(prefix) != (prefix_seed is not None):
        raise click.UsageError("--prefix and --prefix-seed: give both or neither")
    server = Server(address)
    check_length(server, tokens, max_tokens)
    maker = PromptMaker(server)
    content = maker.prompt(tokens, seed, prefix, prefix_seed)
    maker.check(content, tokens)
    answer = server.chat(content, max_tokens)
    click.echo(json.dumps(answer.body, ensure_ascii=False))
    template = maker.template
    details = answer.body["usage"].get("prompt_tokens_details")
    cached = (
        f"{answer.cached_tokens:,} were" if details else "the server hides what was"
    )
    click.echo(
        f"{answer.prompt_tokens:,} input tokens, {template.overhead} of them the chat "
        f"template's ({template.before} before, {template.after} after the content); "
        f"{cached} cached; {answer.seconds:.3f} s",
        err=True,
    )
    if answer.prompt_tokens != tokens:
        raise click.ClickException(
            f"the server used {answer.prompt_tokens} input tokens, its tokenizer "
            f"{tokens}: does something between change the prompt?"
        )


if __name__ == "__main__":
    scripts.run(cli)
