"""All commands of ``dblp``. They import what they need when they run, so that ``dblp --help`` is quick and needs no torch."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from dblp.cli.bench.burst import burst
from dblp.cli.bench.command import allreduce
from dblp.cli.bench.compression import compression
from dblp.cli.doctor import doctor
from dblp.cli.lab.command import lab
from dblp.cli.options import OLD_NAMES
from dblp.cli.pcap import pcap
from dblp.cli.sim.command import sim
from dblp.cli.train.command import train

app = typer.Typer(
    name="dblp",
    help="Loss-tolerant gradient all-reduce over UDP for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: OLD_NAMES.get(name, name),
    },
)
bench = typer.Typer(help="Measure dblp against other transports, in one run.", no_args_is_help=True)
bench.command()(allreduce)
bench.command()(burst)
bench.command()(compression)
bench.callback()(lambda: None)
app.command()(train)
app.add_typer(bench, name="bench")
app.add_typer(sim, name="sim")
app.command()(doctor)
app.command()(pcap)
app.add_typer(lab, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dblp {metadata.version('dblp')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
