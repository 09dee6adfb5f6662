"""One rank of an experiment: ``python -m dblp.cli.lab.worker FOLDER PARENT``, in its host's namespace.

Commands come as lines of JSON on the standard input, answers go out on the standard output; torchrun's variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT) say who is who.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dblp.cli.worker import die_with_parent
from dblp.errors import DblpError

Command = dict[str, Any]
Emit = Callable[..., None]


def main() -> None:
    """Do what the parent says until it says ``end`` or is gone."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    emit = _take_stdout()
    die_with_parent(parent)
    import torch

    torch.set_num_threads(1)
    from dblp.cli.lab.rounds import Rank

    rank = Rank(folder)
    for line in sys.stdin:
        command: Command = json.loads(line)
        if command["do"] == "end":
            break
        try:
            getattr(rank, command["do"])(command, emit)
        except Exception as error:
            emit("error", text=_describe(error))
            os._exit(1)  # peers may hang in a collective, and so would the end of the interpreter
    os._exit(0)  # other ranks are gone: nothing is left that could be closed in order


def _take_stdout() -> Emit:
    """Keep the standard output for answers; what else is printed goes to the standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")

    return emit


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, DblpError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
