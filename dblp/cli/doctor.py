"""``dblp doctor``: what this host offers, what each missing thing costs, and the line to type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dblp.cli.checks import Check, Status, python_checks, transport_checks
from dblp.cli.host import document, write_json
from dblp.cli.lab_checks import lab_checks
from dblp.cli.output import check_outputs
from dblp.transport.config import TransportConfig

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = {"transport": "Data path", "python": "Packages", "lab": "Laboratory (for experiments only)"}
_MARKS = {
    Status.OK: ("✓", "green"),
    Status.LESS: ("!", "yellow"),
    Status.MISSING: ("✗", "red"),
    Status.UNKNOWN: ("?", "cyan"),
}


def report(master: str | None = None, config: TransportConfig | None = None) -> list[Check]:
    """All checks of this host; ``master``: where MASTER_ADDR points. Imports neither torch nor uvloop."""
    config = config or TransportConfig.from_env()
    return [*transport_checks(config, master), *python_checks(), *lab_checks()]


def doctor(
    master: Annotated[
        str | None, typer.Option(envvar="MASTER_ADDR", help="The master's host, to choose the interface.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
) -> None:
    """Say what this host offers dblp, what each missing thing costs, and how to mend it.

    Exit code 0 if dblp can work here, 1 if something essential is missing.
    """
    from rich.console import Console

    check_outputs({"--json": json})
    checks = report(master)
    show(checks, Console())
    if json is not None:
        write_json(json, document("doctor", [check.record() for check in checks]))
    if any(check.fatal for check in checks):
        raise typer.Exit(1)


def show(checks: Sequence[Check], console: Console) -> None:
    """Print the table, then what is missing with its cost and remedy, then the verdict."""
    width = max(len(check.name) for check in checks)
    for group, heading in _HEADINGS.items():
        _show_group(heading, [check for check in checks if check.group == group], console, width)
    lacking = [check for check in checks if check.costs or check.remedy]
    if lacking:
        console.print("[bold]What is missing, what it costs, and what to do[/]\n")
    for check in lacking:
        _show_remedy(check, console)
    _show_verdict(checks, console)


def _show_group(heading: str, checks: Sequence[Check], console: Console, width: int) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(width=width, no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        table.add_row(Text(mark, f"bold {style}"), Text(check.name, "bold"), Text(check.found))
    console.print(f"[bold cyan]{heading}[/]")
    console.print(Padding(table, (0, 0, 1, 2)))


def _show_remedy(check: Check, console: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    mark, style = _MARKS[check.status]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(
        Text(mark, f"bold {style}"),
        Text.assemble((check.name, "bold"), ": ", check.costs or check.found),
    )
    console.print(Padding(table, (0, 0, 0, 2)))
    if check.remedy:  # printed whole, so that it can be copied
        console.print(Text(f"     {check.remedy}", "green"), soft_wrap=True)
    console.print()


def _show_verdict(checks: Sequence[Check], console: Console) -> None:
    fatal = [check.name for check in checks if check.fatal]
    if fatal:
        console.print(f"[bold red]dblp cannot work here:[/] {', '.join(fatal)}")
    elif any(check.status is Status.LESS for check in checks):
        console.print(
            "[bold green]dblp works here,[/] slower or smaller than it could where marked [yellow]![/]"
        )
    else:
        console.print("[bold green]dblp works here.[/]")
