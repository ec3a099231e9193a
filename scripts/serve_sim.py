# SPDX-License-Identifier: Apache-2.0
"""Serve a simulated model: vLLM's real server, scheduler and host tier, no GPU."""

import sys
from pathlib import Path

import click
from tqdm import tqdm

from offload_parity import cli as scripts
from offload_parity import release as releases
from offload_parity import sim_server, simulation, unit_env
from offload_parity.errors import UserError
from offload_parity.paths import shown
from offload_parity.sim_server import Plan, Running
from offload_parity.simulation import Tree
from simulated_server.profiles import PROFILES


def retention(_, __, value: str | None) -> int | str | None:
    """`dense` or a number of tokens."""
    if value is None or value == "dense":
        return value
    if not value.isdigit():
        raise click.BadParameter(f"{value!r}: give dense or a number of tokens")
    return int(value)


def ready(plan: Plan, running: Running) -> str:
    """What the server is, in a few lines."""
    facts = running.facts
    groups = ", ".join(
        f"{g['kind']} {g['block']}"
        + (f" (window {g['window']})" if g["window"] else "")
        + (" drafter" if g["eagle"] else "")
        for g in facts["groups"]
    )
    host = "no host tier"
    if plan.host_gib:
        host = f"host {plan.host_gib:g} GiB = {facts['host_blocks']:,} blocks"
    kept = "its default" if plan.retention is None else plan.retention
    model = (
        f"vLLM {plan.version} ({plan.tree.label}), {PROFILES[plan.profile].title}, MTP "
        f"{plan.mtp}, {plan.ranks} rank(s), retention {kept}"
    )
    gpu = f"GPU {plan.gpu_bytes / 1e9:g} GB = {facts['gpu_blocks']:,} blocks"
    lines = [
        f"Ready: {running.url}",
        f"  {model}",
        f"  groups: {groups}",
        f"  blocks of {facts['block_bytes']:,} bytes; {gpu}; {host}",
        "  seconds are those of the time model"
        if plan.timed
        else "  nothing is computed: seconds mean nothing (give --prefill-rate)",
    ]
    if plan.mtp and not any(g["eagle"] for g in facts["groups"]):
        lines.append("  this release flags no group as the drafter's for this model")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--release", help="A supported release; default: the newest.")
@click.option("--stock", is_flag=False, flag_value="1", default="",
              help="As published, without the series; alone: 1.")  # fmt: skip
@click.option(
    "--tree", type=click.Path(path_type=Path), help="A vLLM tree of your own instead."
)
@click.option(
    "--python", type=click.Path(path_type=Path),
    help="Interpreter that has vLLM's requirements; default: the unit tests' own.",
)  # fmt: skip
@click.option(
    "--profile", type=click.Choice(list(PROFILES)), default="deepseek-v4-flash",
    show_default=True,
)  # fmt: skip
@click.option("--mtp", type=click.IntRange(0, 2), default=2, show_default=True,
              help="Tokens that the drafter proposes; 0: no drafter.")  # fmt: skip
@click.option("--gpu-gb", type=click.FloatRange(0, min_open=True), default=7.0,
              show_default=True, help="KV cache of one rank, 10^9 bytes.")  # fmt: skip
@click.option("--host-gib", type=click.FloatRange(0), default=64.0, show_default=True,
              help="The host tier, in 2^30 bytes; 0: none.")  # fmt: skip
@click.option("--ranks", type=click.Choice(["1", "2", "4", "8"]), default="1",
              callback=lambda _, __, value: int(value), show_default=True,
              help="Tensor-parallel ranks, each with a copy of its own.")  # fmt: skip
@click.option("--retention", callback=retention,
              help="dense or tokens; default: the release's own.")  # fmt: skip
@click.option("--max-model-len", type=click.IntRange(1), default=65_536,
              show_default=True)  # fmt: skip
@click.option("--prefill-rate", type=click.FloatRange(0, min_open=True),
              help="Time model: prompt tokens per second.")  # fmt: skip
@click.option("--host-bandwidth", type=click.FloatRange(0, min_open=True),
              help="Time model: GB/s of one rank, each way.")  # fmt: skip
@click.option("--decode-step", type=click.FloatRange(0), default=0.0,
              help="Time model: seconds of a decoding step.")  # fmt: skip
@click.option("--no-dev-mode", is_flag=True,
              help="Do not offer to empty the GPU side.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65_535), default=8000, show_default=True)
def cli(
    release, stock, tree, python, profile, mtp, gpu_gb, host_gib, ranks, retention,
    max_model_len, prefill_rate, host_bandwidth, decode_step,
    no_dev_mode, port,
) -> None:  # fmt: skip
    """Serve until Ctrl-C."""
    if stock not in ("", "0", "1"):
        raise UserError(f"STOCK={stock}: give STOCK=1 or leave it out")
    if tree is not None and (stock or release):
        raise UserError("--tree says which: leave out --release and --stock")
    if (host_bandwidth or decode_step) and not prefill_rate:
        raise UserError("a time model needs --prefill-rate")
    sim_server.check_port(port)
    if tree is not None:
        which = Tree("tree", tree.resolve())
        version = sim_server.version_of(which.path)
    else:
        chosen = releases.get(release)
        kind = "stock" if stock == "1" else "patched"
        (which,) = simulation.trees_of(chosen, (kind,))
        version = chosen.version
    plan = Plan(
        tree=which, version=version, profile=profile, mtp=mtp,
        gpu_bytes=int(gpu_gb * 1e9), host_gib=host_gib, ranks=ranks,
        retention=retention, max_model_len=max_model_len,
        prefill_tokens_per_s=prefill_rate,
        host_bytes_per_s=host_bandwidth and host_bandwidth * 1e9,
        decode_step_s=decode_step, dev_mode=not no_dev_mode,
    )  # fmt: skip
    interpreter = unit_env.interpreter(python)
    click.echo(f"Starting vLLM {version} ({which.label}) on port {port}; 20 to 60 s")
    with tqdm(
        bar_format="starting, {elapsed}", leave=False, disable=None
    ) as bar, sim_server.serve(
        plan, port, interpreter, waiting=lambda _: bar.refresh()
    ) as running:  # fmt: skip
        bar.close()
        try:
            click.echo(ready(plan, running))
            click.echo(f"  log: {shown(running.log)}; Ctrl-C stops it")
            sys.stdout.flush()
            status = running.wait()
        except KeyboardInterrupt:
            click.echo("Stopping")
            return
    raise UserError(
        f"the server ended by itself: {sim_server.explain(running.log, status, plan)}"
    )


if __name__ == "__main__":
    scripts.run(cli)
