# SPDX-License-Identifier: Apache-2.0
"""What the probes' command lines have in common."""

import csv
import functools
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ..errors import UserError
from . import plots
from .meter import Meter
from .prompts import PromptMaker
from .server import Address, Server

_ADDRESS = (
    click.option(
        "--url",
        default="http://localhost:8000",
        show_default=True,
        envvar="VLLM_URL",
        help="The server itself, not a gateway before it.",
    ),
    click.option("--model", help="Default: the one that the server names."),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="Or OPENAI_API_KEY."),
    click.option(
        "--ca-file",
        type=click.Path(exists=True, dir_okay=False),
        help="Certificates to trust.",
    ),
    click.option("--insecure", is_flag=True, help="Do not check the certificate."),
    click.option(
        "--cert",
        type=click.Path(exists=True, dir_okay=False),
        help="A client certificate with its key.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        show_default=True,
        help="Seconds that one answer may take.",
    ),
    click.option(
        "--connect-timeout",
        type=click.FloatRange(0, min_open=True),
        default=10.0,
        show_default=True,
        help="Seconds that a connection may take.",
    ),
)


def address_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an address; it takes an ``Address`` first."""

    @functools.wraps(command)
    def wrapped(
        url, model, api_key, ca_file, insecure, cert, timeout, connect_timeout, **rest
    ):  # fmt: skip
        if insecure and ca_file:
            raise click.UsageError("--insecure and --ca-file: give one of them")
        verify = False if insecure else ca_file or True
        address = Address(
            url, model, api_key, verify, cert, timeout, connect_timeout
        )  # fmt: skip
        return command(address, **rest)

    for option in reversed(_ADDRESS):
        wrapped = option(wrapped)
    return wrapped


_OUTPUT = (
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--csv", "as_csv", is_flag=True, help="Print the table as CSV."),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Draw the picture: a .png, .svg or .pdf file; needs matplotlib.",
    ),
)


@dataclass(frozen=True)
class Output:
    """How what was measured is shown: as JSON, CSV or else a table; and the picture."""

    as_json: bool
    as_csv: bool
    plot: Path | None


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an output; it takes an ``Output`` as `output`.

    What cannot be shown is refused before an hour is spent on measuring it.
    """

    @functools.wraps(command)
    def wrapped(as_json, as_csv, plot, **rest):
        if as_json and as_csv:
            raise click.UsageError("--json and --csv: give one of them")
        if plot is not None:
            plots.check(plot)
        return command(output=Output(as_json, as_csv, plot), **rest)

    for option in reversed(_OUTPUT):
        wrapped = option(wrapped)
    return wrapped


# Otherwise a second run of the same command would find the first one's blocks.
run_seed = functools.partial(
    click.argument,
    "run_seed",
    type=int,
    default=lambda: int(time.time()),
    required=False,
)


def open_server(address: Address) -> tuple[Meter, PromptMaker]:
    """The server if it is suitable, with what sends and makes prompts.

    Raises:
        UserError: it is not; the message says why and what to do.
    """
    server = Server(address)
    server.check_suitable()
    maker = PromptMaker(server)
    # Its own request is to be over before any is counted.
    _ = maker.template
    return Meter(server), maker


def check_length(server: Server, tokens: int, output: int = 1) -> None:
    """Refuse prompts that the server would refuse.

    Raises:
        UserError: they are too long.
    """
    most = server.max_model_len
    if most is not None and tokens + output > most:
        raise UserError(
            f"{tokens:,} tokens and {output:,} of output are more than the server's "
            f"--max-model-len of {most:,}: ask for fewer"
        )


@contextmanager
def progress(total: int, what: str) -> Iterator[tqdm]:
    """A bar on stderr, on a terminal only."""
    with tqdm(total=total, unit=f" {what}", disable=None, leave=False) as bar:
        yield bar


def report(
    output: Output,
    meter: Meter,
    maker: PromptMaker,
    seed: object,
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
    words: list[str],
    draw: Callable[[Path], None] | None,
    end: Sequence[str] = (),
) -> None:
    """Print the rows and what they say, and draw the picture if one is asked for.

    Args:
        output: how.
        meter, maker, seed: what was asked, and of whom.
        rows: one per request.
        facts: the summary, for JSON.
        words: the summary as lines.
        draw: draws it to a file; None draws nothing.
        end: what is said after everything else.
    """
    lines = [_heading(meter, maker, seed), *words, *meter.warnings(), *end]
    facts = _about(meter, maker, seed) | facts
    if output.as_json:
        click.echo(json.dumps({"requests": rows, **facts, "words": lines}, indent=1))
    elif output.as_csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        click.echo(text.getvalue(), nl=False)
    else:
        click.echo(table(rows))
    if not output.as_json:
        for line in lines:
            click.echo(line, err=output.as_csv)
    sys.stdout.flush()
    if draw is not None and output.plot is not None:
        draw(output.plot)


@contextmanager
def sending(
    output: Output,
    meter: Meter,
    maker: PromptMaker,
    seed: object,
    requests: int,
    judge: Callable[[list[Any]], list[Any]] = list,
) -> Iterator[tuple[tqdm, Callable[[Any], None]]]:
    """A bar, and what is to be called after each request with what it measured.

    None stands for a request that measured nothing. If the rest fails or is stopped,
    the rows so far are printed, which may have taken an hour; no picture is drawn.

    Args:
        output, meter, maker, seed: as of `report`.
        requests: how many will be sent.
        judge: turns what was measured into what has the rows.
    """
    measured: list[Any] = []
    try:
        with progress(requests, "requests") as bar:

            def done(one: Any) -> None:
                if one is not None:
                    measured.append(one)
                bar.update()

            yield bar, done
    except (UserError, KeyboardInterrupt) as error:
        if rows := [one.row() for one in judge(measured)]:
            why = str(error) or "interrupted"
            what = f"NOT FINISHED, {len(rows)} rows measured: {why}"
            facts = {"unfinished": why}
            report(output, meter, maker, seed, rows, facts, [what], None)
        raise


def _about(meter: Meter, maker: PromptMaker, seed: object) -> dict[str, Any]:
    """What was asked, for JSON."""
    server = meter.server
    return {
        "url": server.url,
        "model": server.model,
        "version": server.version,
        "run_seed": seed,
        "template_tokens": maker.template.overhead,
        "limited_tokens": meter.limited(),
    }


def _heading(meter: Meter, maker: PromptMaker, seed: object) -> str:
    """What was asked, in a line."""
    server = meter.server
    release = f"vLLM {server.version}" if server.version else "a server of no version"
    return (
        f"{server.url}: {server.model} on {release}; run seed {seed}; the chat "
        f"template has {maker.template.overhead} of a prompt's tokens"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in columns, numbers to the right."""

    def cell(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else ""
        return f"{value:,}" if isinstance(value, int) else str(value)

    names = list(rows[0])
    cells = [[cell(row[name]) for name in names] for row in rows]
    heads = [name.replace("_", " ") for name in names]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = []
    for line, source in [(heads, rows[0]), *zip(cells, rows, strict=True)]:
        lines.append(
            "  ".join(
                f"{text:<{width}}" if isinstance(source[name], str | bool)
                else f"{text:>{width}}"
                for text, width, name in zip(line, widths, names, strict=True)
            ).rstrip()
        )  # fmt: skip
    return "\n".join(lines)
