"""Experiments: one scenario, arms that change some of its fields, axes along which all of them are run, and a paper's claims.

The TOML of an experiment::

    title = "..."
    paper = "who, where; which figure"
    why = "why ours differs"
    seeds = 3
    scenario.topology = {kind = "star", hosts = 4}
    [[arms]]
    policy = "dctcp"
    set = {"transport.model" = "dctcp"}
    [axes]
    "workload.size" = ["1M", "4M"]
    [[claims]]
    policy = "dlcp"
    against = "dctcp"
    measure = "p99_s"
    paper = -0.918

Rates and times have units ("10gbit", "5us"); a number without one is refused, unless it is 0. Sizes without one are bytes.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dblp.errors import ConfigError, did_you_mean
from dblp.sim.fabric.load import build, scenario
from dblp.sim.fabric.packet import check_packet
from dblp.sim.fabric.scenario import Scenario

PACKAGE = "dblp.sim.experiments"
MEASURES = ("completion_s", "p99_s")
ENGINES = ("packet", "exact")
Point = tuple[tuple[str, Any], ...]
"""Values of the axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A paper's figure for an arm: its measure over that of another, less 1 (-0.3: 30 % less)."""

    policy: str
    """The arm."""
    against: str
    """The arm that it is compared with."""
    measure: str
    """``completion_s`` (mean) or ``p99_s``."""
    paper: float
    """The paper's."""
    at: str = ""
    """Which point of the axes, as ``workload.size=4M``; empty: ours is the best of all."""

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ConfigError(f"measure={self.measure!r}: known are {', '.join(MEASURES)}")

    def is_of(self, point: Point) -> bool:
        """Whether it is about a point of the axes."""
        return not self.at or self.at in {f"{name}={value}" for name, value in point}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One policy that is compared."""

    policy: str
    """Its name."""
    changes: Mapping[str, Any]
    """Dotted names of the scenario's fields, and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    experiment: str
    policy: str
    point: Point
    seed: int
    table: Mapping[str, Any]
    """The scenario as a table, which a worker process reads again."""
    engine: str = "packet"

    @property
    def scenario(self) -> Scenario:
        """The scenario."""
        return scenario(self.table)

    @property
    def key(self) -> str:
        """Of its result, among those of earlier runs: it changes with anything that the result depends on."""
        text = json.dumps([self.table, self.seed, self.engine, code_digest()], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What ``dblp sim run`` runs."""

    name: str
    """Of the TOML, without its ending."""
    title: str
    """What is shown."""
    paper: str
    """Whose figures are beside ours."""
    why: str
    """Why ours differ."""
    seeds: int
    """Seeds, unless told otherwise."""
    engine: str
    """``packet`` or ``exact``."""
    table: Mapping[str, Any]
    """The scenario that all arms share."""
    arms: tuple[Arm, ...]
    """In the order of the tables."""
    axes: Mapping[str, Sequence[Any]]
    """Dotted names of fields, and the values that they take."""
    claims: tuple[Claim, ...]
    """The paper's figures."""

    @property
    def setting(self) -> dict[str, Any]:
        """What is run, as the TOML has it, and the digest of the code that runs it."""
        arms = [{"policy": arm.policy, "set": dict(arm.changes)} for arm in self.arms]
        axes = {name: list(values) for name, values in self.axes.items()}
        return {
            "engine": self.engine,
            "scenario": dict(self.table),
            "arms": arms,
            "axes": axes,
            "code": code_digest(),
        }

    def points(self) -> Iterator[Point]:
        """All combinations of the axes' values."""
        for values in itertools.product(*self.axes.values()):
            yield tuple(zip(self.axes, values, strict=True))

    def cases(self, seeds: Sequence[int]) -> list[Case]:
        """All runs; raises ConfigError that names the arm if its scenario is wrong, or is not for the engine."""
        found = []
        for point, arm in itertools.product(self.points(), self.arms):
            try:
                table = self._table(point, arm)
                _check_for(self.engine, scenario(table, units=True))
            except ConfigError as error:
                raise ConfigError(f"{self.name}: arm {arm.policy!r}: {error}") from None
            found += [self._case(arm, point, seed, table) for seed in seeds]
        return found

    def values(self, policy: str, point: Point) -> dict[str, Any]:
        """What an arm's runs at a point have for the axes' fields: an arm may set one of them for itself."""
        arm = next(arm for arm in self.arms if arm.policy == policy)
        table = self._table(point, arm)
        return {field: _value_of(table, field) for field in self.axes}

    def _table(self, point: Point, arm: Arm) -> dict[str, Any]:
        return changed(self.table, {**dict(point), **arm.changes})

    def _case(self, arm: Arm, point: Point, seed: int, table: Mapping[str, Any]) -> Case:
        return Case(
            experiment=self.name, policy=arm.policy, point=point, seed=seed, table=table, engine=self.engine
        )


@functools.cache
def code_digest() -> str:
    """Of the source of the simulator and of what its exact engine runs: results of other code are not taken for this one's."""
    digest = hashlib.blake2b(digest_size=12)
    for folder in ("sim", "transport", "collectives"):
        for file in sorted((Path(__file__).parents[2] / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def experiment_names() -> list[str]:
    """Experiments in the package."""
    files = resources.files(PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_experiment(name: str) -> Experiment:
    """An experiment by its name, or from a TOML file. Raises ConfigError."""
    if name in experiment_names():
        return read_experiment(name, resources.files(PACKAGE).joinpath(f"{name}.toml").read_text())
    if not name.endswith(".toml"):
        raise ConfigError(
            f"experiment {name!r}: known are {', '.join(experiment_names())}, or a TOML file"
            f"{did_you_mean(name, experiment_names())}"
        )
    try:
        text = Path(name).read_text()
    except OSError as error:
        raise ConfigError(
            f"experiment {name}: {error.strerror}; `dblp sim list` shows those of the package"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"experiment {name}: not TOML: it is no text") from None
    try:
        return read_experiment(Path(name).stem, text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {str(error).removeprefix(f'{Path(name).stem}: ')}") from None


def read_experiment(name: str, text: str) -> Experiment:
    """An experiment from its TOML; raises ConfigError that names the field."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    values = {**_DEFAULTS, "title": name, "arms": [{"policy": name}], **table}
    for field, value in values.items():
        if field not in _FIELDS:
            near = did_you_mean(field, _FIELDS)
            raise ConfigError(
                f"{name}: {field}: no such field of an experiment; known are {', '.join(_FIELDS)}{near}"
            )
        kind, what = _FIELDS[field]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{name}: {field}={value!r}: {what} is expected")
    found = Experiment(
        name=name,
        title=values["title"],
        paper=values["paper"],
        why=values["why"],
        seeds=values["seeds"],
        engine=values["engine"],
        table=values["scenario"],
        arms=tuple(_arm(row, f"{name}: arms[{n}]") for n, row in enumerate(values["arms"])),
        axes=values["axes"],
        claims=tuple(build(Claim, row, f"{name}: claims[{n}]") for n, row in enumerate(values["claims"])),
    )
    _check(found)
    return found


_FIELDS: Mapping[str, tuple[type, str]] = {
    "title": (str, "a text"),
    "paper": (str, "a text"),
    "why": (str, "a text"),
    "seeds": (int, "a number of seeds"),
    "engine": (str, "a text"),
    "scenario": (dict, "a table"),
    "arms": (list, "an array of tables, [[arms]],"),
    "axes": (dict, "a table"),
    "claims": (list, "an array of tables, [[claims]],"),
}
"""Fields of the file, their type, and that in words."""
_DEFAULTS: Mapping[str, Any] = {
    "paper": "", "why": "", "seeds": 1, "engine": "packet", "scenario": {}, "axes": {}, "claims": [],
}  # fmt: skip


def _arm(row: Any, place: str) -> Arm:
    if not isinstance(row, dict) or not isinstance(row.get("policy"), str) or set(row) - {"policy", "set"}:
        raise ConfigError(f"{place}: policy, and set if it changes something, are its fields")
    if not isinstance(row.get("set", {}), dict):
        raise ConfigError(f"{place}: set={row['set']!r}: a table of dotted names and values is expected")
    return Arm(policy=row["policy"], changes=row.get("set", {}))


def _check(found: Experiment) -> None:
    known = [arm.policy for arm in found.arms]
    if not known:
        raise ConfigError(f"{found.name}: arms: one or more are needed")
    if found.seeds < 1:
        raise ConfigError(f"{found.name}: seeds={found.seeds}: one or more are needed")
    for field, axis in found.axes.items():
        if not isinstance(axis, list) or not axis:
            raise ConfigError(
                f"{found.name}: axes: {field}={axis!r}: an array of one value or more is expected"
            )
    for claim in found.claims:
        for policy in (claim.policy, claim.against):
            if policy not in known:
                near = did_you_mean(policy, known)
                raise ConfigError(
                    f"{found.name}: claims: no arm {policy!r}; arms are {', '.join(known)}{near}"
                )
        field, _, value = claim.at.partition("=")
        values = [str(known_value) for known_value in found.axes.get(field, ())]
        if claim.at and value not in values:
            points = [f"{name}={point}" for name, axis in found.axes.items() for point in axis]
            raise ConfigError(
                f"{found.name}: claims: at={claim.at!r}: no such point; known are {', '.join(points) or 'none'}"
            )
    if len(set(known)) < len(known):
        raise ConfigError(f"{found.name}: arms: two have one policy")
    if found.engine not in ENGINES:
        raise ConfigError(f"{found.name}: engine={found.engine!r}: known are {', '.join(ENGINES)}")
    found.cases([0])


def _check_for(engine: str, wanted: Scenario) -> None:
    """Raise ConfigError unless the engine has all of a scenario."""
    if engine == "exact":
        from dblp.sim.fabric.exact import (
            check_exact,
        )  # endpoints and collectives: only who runs them waits for them

        check_exact(wanted)
    else:
        check_packet(wanted)


def _value_of(table: Any, field: str) -> Any:
    """Of a dotted name in nested tables; None if an arm replaced the table that it was in."""
    for part in field.split("."):
        try:
            table = table[int(part) if part.isdigit() else part]
        except (IndexError, KeyError, TypeError):
            return None
    return table


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested tables with the fields of dotted names set anew; a number names an item of an array.

    Raises ConfigError for a name that leads through what is neither a table nor an array.
    """
    result: dict[str, Any] = copy.deepcopy(dict(table))
    for name, value in changes.items():
        *path, last = name.split(".")
        inner: Any = result
        try:
            for part in path:
                inner = inner[int(part)] if part.isdigit() else inner.setdefault(part, {})
            inner[last] = value
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ConfigError(
                f"{name}: no such field: its place is neither a table nor in an array"
            ) from None
    return result


def measure(times: Sequence[float], name: str) -> float:
    """A claim's measure of the times of an arm."""
    good = np.array(times)[~np.isnan(times)]
    if not len(good):
        return float("nan")
    return float(good.mean() if name == "completion_s" else np.percentile(good, 99))
