"""The command ``dblp``: its entry, exit codes, and how errors are told. The commands themselves: ``dblp.cli.app``.

This module imports next to nothing, so that Ctrl-C is heard from the start: the commands take most of a second to import.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_ERROR = 2
"""Exit code after a DblpError: wrong use, a missing package, a host that cannot do what was asked."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells have it."""
_INTERRUPTED = "dblp: interrupted; nothing is left running"


def main() -> None:
    """Console entry point: run the command line of this process and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _end_at_once)
        import dblp.cli.app  # noqa: F401  # here, while nothing runs that would have to end in order

        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line (without the program's name); returns the exit code.

    0: done. 1: a worker failed. 2: wrong use or any other DblpError, told in one line. 130: Ctrl-C.
    """
    from dblp.cli.app import app
    from dblp.errors import DblpError

    try:
        app(args=arguments, prog_name="dblp")
    except DblpError as error:
        _say(f"[bold red]dblp: error:[/] {_escaped(str(error))}")
        return getattr(error, "exit_code", EXIT_ERROR)
    except KeyboardInterrupt:  # outside of the command itself
        _say(f"[yellow]{_INTERRUPTED}[/]")
        return EXIT_INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == EXIT_INTERRUPTED:
            _say(f"[yellow]{_INTERRUPTED}[/]")
        elif code == 128 + signal.SIGTERM:
            _say("[yellow]dblp: ended by SIGTERM; nothing is left running[/]")
        return code
    return 0


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Within an import: an exception there would come up as another one, or as a page of it."""
    os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
