"""The command ``dblp``.

Sub-commands import what they need when they run, so that ``dblp --help`` is quick and needs no torch.
"""

from __future__ import annotations

import signal
import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dblp.cli.bench.burst import burst
from dblp.cli.bench.command import allreduce
from dblp.cli.bench.compression import compression
from dblp.cli.doctor import doctor
from dblp.cli.lab.command import lab
from dblp.cli.pcap import pcap
from dblp.cli.sim.command import sim
from dblp.cli.train.command import train
from dblp.errors import DblpError

EXIT_ERROR = 2
"""Exit code after a DblpError: wrong use, a missing package, a host that cannot do what was asked."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells have it."""

app = typer.Typer(
    name="dblp",
    help="Loss-tolerant gradient all-reduce over UDP for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


def main() -> None:
    """Console entry point: run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line (without the program's name); returns the exit code.

    0: done. 1: a worker failed. 2: wrong use or any other DblpError, told in one line. 130: Ctrl-C.
    """
    try:
        app(args=arguments, prog_name="dblp")
    except DblpError as error:
        Console(stderr=True).print(
            f"[bold red]dblp: error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        return getattr(error, "exit_code", EXIT_ERROR)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == EXIT_INTERRUPTED:
            Console(stderr=True).print("[yellow]dblp: interrupted; nothing is left running[/]")
        return code
    return 0


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


if __name__ == "__main__":
    main()
