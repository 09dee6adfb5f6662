"""Make docs/reproduction.md from the JSON files of experiments.

    for name in ...; do dblp sim run $name --json FOLDER/$name.json; done
    python docs/generate_reproduction.py FOLDER "29 November 2026"

The date is when they were run. Titles and notes are those of this checkout's TOMLs, whatever checkout Python would import. An
experiment whose file is not in the folder is listed as not run; one that has other arms by now is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(
    0, str(ROOT)
)  # a script's folder is there, not its checkout: an installed dblp may be another one

from dblp.cli.sim.command import claim_at  # noqa: E402
from dblp.cli.sim.palette import axis_names  # noqa: E402
from dblp.sim.fabric.experiment import Experiment, experiment_names, load_experiment  # noqa: E402
from dblp.sim.fabric.sweep import claims  # noqa: E402
from dblp.units import format_seconds  # noqa: E402

HEAD = f"""# The papers' figures, and ours

Each experiment of the fabric simulator ([fabric.md](fabric.md)) beside the paper that it is after.

## Run it yourself

```
dblp sim list                                               # the experiments, their arms and points
dblp sim run dlcp --seeds 1 --report dlcp.html              # one of them, with tables and pictures
dblp sim run ethereal --resume results/ --picture e.png     # goes on where it was stopped
```

Each prints its table, the paper's figures beside its own, and why they differ. Simulated times do not depend on the machine.
Yours is a TOML file: copy one of `sim/experiments` and change its scenario, arms or axes (docs/fabric.md, "An experiment").

This page is made from all of them:

```
mkdir figures
for name in {" ".join(experiment_names())}; do dblp sim run $name --json figures/$name.json; done
python docs/generate_reproduction.py figures "$(date '+%-d %B %Y')"
```

It was made so on {{made}}.

## Measurements

A figure is a measure of one policy over that of another, less 1: -30 % is 30 % less time. `ours` is at the point that is named,
or the best of all points, which is named, too. Figures that fall short stand as they are, with the reason.
"""


def main() -> None:
    """Write the page beside this script."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER DATE")
    text = "\n".join(page(Path(sys.argv[1]), sys.argv[2])) + "\n"
    Path(__file__).with_name("reproduction.md").write_text(text)


def page(folder: Path, date: str) -> Iterator[str]:
    """The page's parts; ``date``: when the experiments were run."""
    experiments = [load_experiment(name) for name in experiment_names()]
    found = {experiment.name: _read(folder, experiment) for experiment in experiments}
    machines = {_machine(table["host"]) for table in found.values() if table is not None}
    yield HEAD.replace("{made}", ", ".join([date, *sorted(machines)]))
    yield from _claims(experiments, found)
    for experiment in experiments:
        yield from _section(experiment, found[experiment.name])


def _machine(host: Mapping[str, Any]) -> str:
    return f"{host['cores']} cores ({host['cpu']})"


def _read(folder: Path, experiment: Experiment) -> Mapping[str, Any] | None:
    path = folder / f"{experiment.name}.json"
    if not path.exists():
        return None
    table: Mapping[str, Any] = json.loads(path.read_text())
    expected = [
        {"policy": arm.policy, **experiment.values(arm.policy, point)}
        for point in experiment.points()
        for arm in experiment.arms
    ]
    if [
        {key: row.get(key) for key in want} for row, want in zip(table["records"], expected, strict=False)
    ] != expected:
        sys.exit(f"{path}: not of the arms and points of {experiment.name}: run it again")
    return table


def _claims(
    experiments: Sequence[Experiment], found: Mapping[str, Mapping[str, Any] | None]
) -> Iterator[str]:
    yield "| Experiment | Policy | Against | Measure | At | Paper | Ours |"
    yield "|---|---|---|---|---|---|---|"
    for experiment in experiments:
        table = found[experiment.name]
        for claim in claims(experiment, table["records"]) if table is not None else ():
            ours = "-" if claim["ours"] is None else f"{claim['ours']:+.1%}"
            measure = {"completion_s": "mean", "p99_s": "p99"}[claim["measure"]]
            at = claim_at(claim) or "the only point"
            yield (
                f"| {experiment.name} | {claim['policy']} | {claim['against']} | {measure} | {at} "
                f"| {claim['paper']:+.1%} | {ours} |"
            )
    yield ""


def _section(experiment: Experiment, table: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"### {experiment.name}\n"
    yield f"{experiment.title}.\n"
    if experiment.paper:
        yield f"Paper: {experiment.paper}.\n"
    if experiment.why:
        yield f"{'Why they differ' if experiment.paper else 'Note'}: {experiment.why}\n"
    if table is None:
        yield "Not run for this page.\n"
        return
    yield from _rows(table["records"])


def _rows(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    axes = axis_names(name for name in records[0] if "." in name)
    compressing = "sent_share" in records[0]
    more = ["sent", "reacts after"] if compressing else ["max link load", "missing"]
    heads = ["policy", *axes.values(), "hosts", "mean", "p99", *more, "seeds"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in records:
        times = [
            "-" if row[name] is None else format_seconds(row[name]) for name in ("completion_s", "p99_s")
        ]
        cells = [row["policy"], *(str(row[name]) for name in axes), str(row["hosts"]), *times]
        cells += [*(_compression(row) if compressing else _network(row)), str(row["seeds"])]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _network(row: Mapping[str, Any]) -> list[str]:
    load = row["max_link_load_ratio"]
    unfinished = f", {row['unfinished']} unfinished" if row["unfinished"] else ""
    missing = "-" if row["missing_share"] is None else f"{row['missing_share']:.2%}"
    return ["-" if load is None else f"{load:.3f}", f"{missing}{unfinished}"]


def _compression(row: Mapping[str, Any]) -> list[str]:
    late = row["reaction_rounds"]
    sent = row["sent_share"]
    return ["-" if sent is None else f"{sent:.2%}", "-" if late is None else f"{late:.0f} rounds"]


if __name__ == "__main__":
    main()
