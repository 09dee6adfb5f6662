"""The progress bars of ``dblp train``: one for each arm and seed, fed by rank 0's events."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from dblp.cli.train.outcome import Outcome
from dblp.cli.train.plan import TrainPlan


class TrainProgress:
    """Shows where the run is. Where output is no terminal, it prints a line for each finished arm instead."""

    def __init__(self, plan: TrainPlan, console: Console) -> None:
        self._plan, self._console = plan, console
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> TrainProgress:
        self._bars.start()
        self._starting = self._bars.add_task(f"starting {self._plan.ranks} workers", total=None, state="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def advance(self, event: dict[str, Any]) -> None:
        """Show a ``progress`` event."""
        accuracy = "  -  " if event["accuracy"] is None else f"{event['accuracy']:.1%}"
        state = (
            f"epoch {event['epoch']}/{self._plan.epochs} loss {event['loss']:.3f} accuracy {accuracy}"
            f" {event['rounds_per_s']:.0f} rounds/s"
        )
        self._bars.update(self._task(event["arm"], event["seed"]), completed=event["share"], state=state)

    def finish(self, outcome: Outcome) -> None:
        """Show that an arm is done with a seed."""
        state = f"accuracy [bold]{outcome.test_accuracy:.1%}[/] in {outcome.wall_s:.1f} s"
        self._bars.update(self._task(outcome.arm, outcome.seed), completed=1.0, state=state)
        if not self._console.is_terminal:
            self._console.print(f"{outcome.arm}, seed {outcome.seed}: {state}", highlight=False)

    def _task(self, arm: str, seed: int) -> TaskID:
        if (arm, seed) not in self._tasks:
            self._bars.update(self._starting, visible=False)
            name = f"{arm:<12}" + (f" seed {seed}" if len(self._plan.seeds) > 1 else "")
            self._tasks[arm, seed] = self._bars.add_task(name, total=1.0, state="")
        return self._tasks[arm, seed]
