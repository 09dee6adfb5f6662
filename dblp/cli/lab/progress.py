"""The progress of ``dblp lab run``: a bar an arm and size; where output is no terminal, lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from dblp.sim.lab.experiment import Experiment
from dblp.sim.lab.means import in_words
from dblp.units import format_bytes, format_count

LINE_S = 10.0
"""Between two lines on what is no terminal, seconds."""


class LabProgress:
    """Hears a run (``dblp.sim.lab.run.Watch``) and shows it."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._experiment, self._console = experiment, console
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._said_s = time.monotonic()

    def __enter__(self) -> LabProgress:
        self._bars.start()
        self._stage = self._bars.add_task("", total=None, state="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.update(self._stage, visible=False)
        self._bars.stop()

    def stage(self, text: str) -> None:
        """Something begins."""
        self._bars.update(self._stage, description=text)
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def means(self, means: Mapping[str, str]) -> None:
        """A line that stays."""
        self._bars.console.print(in_words(means), highlight=False, markup=False)

    def block(self, arm: str, nbytes: int, done: int, rounds: int) -> None:
        """An arm has done so many of its rounds of a size."""
        self._bars.update(self._stage, description=f"{arm}'s turn")
        name = f"{arm}, {format_bytes(nbytes)}"
        task = self._task(arm, nbytes, name, rounds)
        self._bars.update(task, completed=done, state=f"{done}/{rounds}")
        self._line(f"{name}: {done} of {format_count(rounds, 'round')}")

    def event(self, rank: int, event: dict[str, Any]) -> None:
        """A training run is so far."""
        if event["kind"] != "progress":
            return
        accuracy = "" if event["accuracy"] is None else f" accuracy {event['accuracy']:.1%}"
        state = f"epoch {event['epoch']} loss {event['loss']:.3f}{accuracy}"
        task = self._task(event["arm"], event["seed"], f"{event['arm']}, seed {event['seed']}", 1.0)
        self._bars.update(task, completed=event["share"], state=state)
        self._line(f"{event['arm']}, seed {event['seed']}: {event['share']:.0%}, {state}")

    def _line(self, text: str) -> None:
        """Say it where there are no bars, if the last line is old."""
        if not self._console.is_terminal and time.monotonic() - self._said_s >= LINE_S:
            self._said_s = time.monotonic()
            self._console.print(text, highlight=False)

    def _task(self, arm: str, number: int, name: str, total: float) -> TaskID:
        if (arm, number) not in self._tasks:
            self._tasks[arm, number] = self._bars.add_task(name, total=total, state="")
        return self._tasks[arm, number]
