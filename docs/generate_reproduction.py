"""Make docs/reproduction.md from the JSON files of experiments.

    for name in ...; do dblp sim run $name --json FOLDER/$name.json; done
    python docs/generate_reproduction.py FOLDER

An experiment whose file is not in the folder is listed as not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dblp.cli.sim.palette import axis_names
from dblp.sim.fabric.experiment import Experiment, experiment_names, load_experiment
from dblp.units import format_seconds

WHEN = "29 November 2026"
MACHINE = "shared virtual machine with 2 cores (AMD EPYC)"
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
python docs/generate_reproduction.py figures
```

It was made so on a {MACHINE}, {WHEN}.

## Measurements

A figure is a measure of one policy over that of another, less 1: -30 % is 30 % less time. `ours` is at the point that is named,
or the best of all points. Figures that fall short stand as they are, with the reason.
"""


def main() -> None:
    """Write the page beside this script."""
    folder = Path(sys.argv[1])
    Path(__file__).with_name("reproduction.md").write_text("\n".join(page(folder)) + "\n")


def page(folder: Path) -> Iterator[str]:
    """The page's parts."""
    found = {name: _read(folder / f"{name}.json") for name in experiment_names()}
    yield HEAD
    yield from _claims(found)
    for name, table in found.items():
        yield from _section(load_experiment(name), table)


def _read(path: Path) -> Mapping[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _claims(found: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    yield "| Experiment | Policy | Against | Measure | At | Paper | Ours |"
    yield "|---|---|---|---|---|---|---|"
    for name, table in found.items():
        for claim in (table or {}).get("claims", []):
            ours = "-" if claim["ours"] is None else f"{claim['ours']:+.1%}"
            measure = {"completion_s": "mean", "p99_s": "p99"}[claim["measure"]]
            yield (
                f"| {name} | {claim['policy']} | {claim['against']} | {measure} | {claim['at'] or 'best'} "
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
    return ["-" if load is None else f"{load:.3f}", f"{row['missing_share']:.2%}{unfinished}"]


def _compression(row: Mapping[str, Any]) -> list[str]:
    late = row["reaction_rounds"]
    return [f"{row['sent_share']:.2%}", "-" if late is None else f"{late:.0f} rounds"]


if __name__ == "__main__":
    main()
