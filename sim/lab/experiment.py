"""Experiments: what a person writes in a TOML file, checked once, and those that ship."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dblp.collectives.algorithms import check_policy
from dblp.errors import ConfigError, DblpError, did_you_mean
from dblp.sim.lab.arms import Arm, parse_arm
from dblp.sim.lab.impairments import Schedule, parse_schedule
from dblp.sim.lab.plan import make_plan
from dblp.sim.lab.topology import Topology, load_topology
from dblp.sim.lab.traffic import Traffic, parse_traffic
from dblp.units import parse_bytes, parse_seconds

_LEAST_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank that comes late to each round."""

    rank: int
    by_s: float
    """Seconds after the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Whole training runs in place of rounds; fields as the options of ``dblp train``."""

    model: str = "cnn"
    data: str = "digits"
    data_dir: str = ""
    epochs: int = 0
    """0: the recipe's."""
    batch: int = 0
    """0: the recipe's."""
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One network, one schedule of impairments, and the arms that meet them in turn. Raises ConfigError that names the field."""

    name: str
    title: str
    """One line for tables and reports."""
    topology: Topology
    arms: tuple[Arm, ...]
    about: str = ""
    """What it is for, and where it comes from."""
    impair: str = ""
    """Schedule of impairments (docs/lab.md); empty: none."""
    sizes: tuple[int, ...] = (10 * 2**20,)
    """Bytes of the reduced float32 tensor."""
    rounds: int = 100
    """Timed rounds of each arm and size."""
    block: int = 10
    """Rounds of an arm before the next one's turn."""
    seconds: float = 20.0
    """Time after which a block ends however few rounds it has: slow arms do fewer."""
    algorithm: str = "auto"
    """Of dblp's arms; ``auto``: what each policy says."""
    timeout_s: float = 300.0
    """Of a round."""
    traffic: Traffic | None = None
    """What the cross hosts send meanwhile, through the queues that the ranks' packets pass too."""
    slow: Slow | None = None
    train: Training | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("block", 1), ("seconds", 0.01), ("timeout_s", 1.0)):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not least <= value < math.inf
            ):
                raise ConfigError(f"{name}={value!r}: needs a number of at least {least:g}")
        self._check_arms()
        if self.topology.hosts < 2:
            raise ConfigError(
                f"topology: hosts={self.topology.hosts}: a rank a host, and two or more are needed"
            )
        if not self.sizes or any(size < _LEAST_BYTES or size % _LEAST_BYTES for size in self.sizes):
            raise ConfigError(f"sizes={self.sizes}: each a multiple of 4 bytes, one or more of them")
        if self.slow is not None and not 0 <= self.slow.rank < self.topology.hosts:
            raise ConfigError(f"slow: rank={self.slow.rank}: there are ranks 0 to {self.topology.hosts - 1}")
        if self.traffic is not None and not self.topology.cross:
            raise ConfigError("traffic: the topology has no cross hosts: give it cross = 1 or more")
        self._check_links()
        self._check_policies()

    def _check_arms(self) -> None:
        names = [arm.name for arm in self.arms]
        if not names:
            raise ConfigError("arms: one or more are needed")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"arms: {twice} stands twice")

    def _check_links(self) -> None:
        """The schedule, and that the links which it names are there."""
        try:
            named = self.schedule.base.links
        except ConfigError as error:
            raise ConfigError(f"impair: {error}") from None
        known = make_plan(self.topology).links
        for link in named:
            if link not in known:
                raise ConfigError(
                    f"impair: links({'+'.join(named)}): no link {link!r} in this {self.topology.kind}: "
                    f"known are {', '.join(known)}{did_you_mean(link, known)}"
                )

    def _check_policies(self) -> None:
        """Now, and not when all ranks have met."""
        for arm in self.arms:
            policy = arm.policy(self.algorithm)
            try:
                if policy is not None:
                    check_policy(policy, self.topology.hosts)
            except DblpError as error:
                raise ConfigError(f"arms: {arm.name} by algorithm {self.algorithm}: {error}") from None

    @property
    def schedule(self) -> Schedule:
        """What happens to packets in time."""
        return parse_schedule(self.impair)

    def with_(self, **changes: Any) -> Experiment:
        """The same with other values."""
        return replace(self, **changes)

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        plain = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        for name in ("topology", "slow", "train"):
            plain[name] = asdict(plain[name]) if plain[name] is not None else None
        plain["traffic"] = str(self.traffic) if self.traffic is not None else ""
        return {**plain, "sizes": list(self.sizes), "arms": [arm.name for arm in self.arms]}


_Reader = Callable[[Any], Any]


def _list_of(read: _Reader) -> _Reader:
    def read_list(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ConfigError('a list is expected, as in ["a", "b"]')
        return tuple(read(item) for item in value)

    return read_list


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError("a text is expected")
    return value.strip()


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError("a whole number is expected")
    return value


def _unit(parse: Callable[[str], float]) -> _Reader:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError("a number with a unit is expected, as a text")
        return parse(str(value))

    return read


_TABLES: Mapping[str, tuple[type[Any], Mapping[str, tuple[str, _Reader]]]] = {
    "slow": (Slow, {"rank": ("rank", _whole), "by": ("by_s", _unit(parse_seconds))}),
    "train": (
        Training,
        {
            "model": ("model", _text),
            "data": ("data", _text),
            "data_dir": ("data_dir", _text),
            "epochs": ("epochs", _whole),
            "batch": ("batch", _whole),
            "seeds": ("seeds", _list_of(_whole)),
        },
    ),
}
"""Tables of the file: their class, and for each key its field and how it is read."""
_KEYS: Mapping[str, tuple[str, _Reader]] = {
    "title": ("title", _text),
    "about": ("about", _text),
    "impair": ("impair", _text),
    "sizes": ("sizes", _list_of(_unit(parse_bytes))),
    "traffic": ("traffic", lambda text: parse_traffic(_text(text))),
    "arms": ("arms", _list_of(lambda text: parse_arm(_text(text)))),
    "rounds": ("rounds", _whole),
    "block": ("block", _whole),
    "seconds": ("seconds", _unit(parse_seconds)),
    "algorithm": ("algorithm", _text),
    "timeout": ("timeout_s", _unit(parse_seconds)),
}


def load_experiment(source: str | Path) -> Experiment:
    """A shipped name, or the path of a TOML file; raises ConfigError that names file and field."""
    where, name, text = _read(source)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    return from_table(table, where, name)


def place_of(source: str | Path) -> str:
    """What errors call a source."""
    return f"experiment {source}" if isinstance(source, str) and source in shipped() else str(Path(source))


def shipped() -> tuple[str, ...]:
    """Names of the experiments that ship."""
    folder = resources.files("dblp.sim.lab").joinpath("experiments")
    return tuple(sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml")))


def from_table(table: Mapping[str, Any], where: str, name: str) -> Experiment:
    """An experiment from a parsed file; ``where`` begins every error."""
    known = ("topology", *_TABLES, *_KEYS)
    unknown = [key for key in table if key not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"{where}: no field {unknown[0]!r}: known are {', '.join(known)}{near}")
    missing = [key for key in ("title", "topology", "arms") if key not in table]
    if missing:
        raise ConfigError(f"{where}: lacks {' and '.join(missing)}")
    values = dict(_value(where, key, table[key], _KEYS) for key in table if key in _KEYS)
    values |= {key: _table(where, key, table[key]) for key in table if key in _TABLES}
    try:
        values["topology"] = _topology(table["topology"])
        return Experiment(name=name, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _topology(value: Any) -> Topology:
    if isinstance(value, (str, Mapping)):
        return load_topology(value)
    raise ConfigError("topology: a table is expected, or the name of one that ships")


def _table(where: str, name: str, table: Any) -> Any:
    cls, keys = _TABLES[name]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {name}: a table is expected, as in [{name}]")
    unknown = [key for key in table if key not in keys]
    if unknown:
        near = did_you_mean(unknown[0], keys)
        raise ConfigError(f"{where}: {name}: no field {unknown[0]!r}: known are {', '.join(keys)}{near}")
    required = [f.name for f in fields(cls) if f.default is MISSING]
    values = dict(_value(f"{where}: {name}", key, table[key], keys) for key in table)
    missing = [key for key, (target, _) in keys.items() if target in required and target not in values]
    if missing:
        raise ConfigError(f"{where}: {name}: lacks {' and '.join(missing)}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(where: str, key: str, value: Any, keys: Mapping[str, tuple[str, _Reader]]) -> tuple[str, Any]:
    target, read = keys[key]
    try:
        return target, read(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {key}: {error}") from None


def _read(source: str | Path) -> tuple[str, str, str]:
    """What to call the source in errors, the experiment's name, and the text."""
    if isinstance(source, str) and source in shipped():
        file = resources.files("dblp.sim.lab").joinpath("experiments", f"{source}.toml")
        return place_of(source), source, file.read_text()
    path = Path(source)
    if path.suffix != ".toml":
        raise ConfigError(
            f"experiment {source!s}: neither a .toml file nor one that ships ({', '.join(shipped())})"
            f"{did_you_mean(str(source), shipped())}"
        )
    try:
        return place_of(source), path.stem, path.read_text()
    except OSError as error:
        raise ConfigError(f"experiment {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"experiment {path}: cannot be read: it is no text") from None
