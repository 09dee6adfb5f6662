"""Tables on terminals and in files, with nothing cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ANY_WIDTH = 10_000
"""Columns, more than any table has."""


def print_whole(console: Console, table: Table) -> None:
    """Print a table with nothing cut off: a file takes lines as long as they are, a terminal has the last columns folded."""
    from rich.console import Console

    if not console.is_terminal:
        wide = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
        console = Console(file=console.file, width=max(console.width, wide))
    console.print(table)
