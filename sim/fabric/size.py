"""How many flows a scenario has, told from its numbers: one that no memory holds is refused before anything of it is made."""

from __future__ import annotations

import math

from dblp.errors import ConfigError
from dblp.sim.fabric.algorithms import SEGMENTS
from dblp.sim.fabric.distributions import mean_size
from dblp.sim.fabric.scenario import SIZES, Scenario
from dblp.sim.fabric.traces import buckets, load_trace

FLOW_BYTES = 800
"""Memory of a flow in a run, with its share of the graph, its chunks and timers: measured, 1.7 GB for 2.1 million."""
MOST_FLOWS = 20_000_000
"""Flows of a run: 16 GiB."""


def check_size(scenario: Scenario, group: int = 0) -> None:
    """Raise ConfigError that names the fields and what would do if a scenario has too many flows. ``group``: ranks of a group of
    a hierarchical all-reduce."""
    load, hosts = scenario.workload, scenario.topology.host_count
    counts = {
        f"workload.{load.kind}": _workload(scenario, group),
        "background.load": _background(scenario),
        "bursts.rate_hz": scenario.bursts.rate_hz * scenario.bursts.until * scenario.bursts.senders,
    }
    if sum(counts.values()) <= MOST_FLOWS:
        return
    field = max(counts, key=lambda name: counts[name])
    much = f"{sum(counts.values()):,.0f} flows, of which a run holds {MOST_FLOWS:,} at most (16 GiB)"
    if field == "background.load":
        raise ConfigError(
            f"{field}={scenario.background.load:g}: {much}; an earlier background.until is needed"
        )
    if field == "bursts.rate_hz":
        raise ConfigError(f"{field}={scenario.bursts.rate_hz:g}: {much}; an earlier bursts.until is needed")
    if load.kind == "flows":
        raise ConfigError(f"workload.flows={load.flows}: {much}")
    if load.kind in ("incast", "permutation"):
        raise ConfigError(f"workload.rounds={load.rounds}, {scenario.ranks:,} of {hosts:,} hosts: {much}")
    raise ConfigError(f"workload.algorithm={load.algorithm!r}, {_of(scenario)}: {much}; {_remedy(scenario)}")


def _of(scenario: Scenario) -> str:
    load = scenario.workload
    parts = f", workload.segment={load.segment}" if load.segment else ""
    many = {"workload.rounds": load.rounds} if load.kind == "all_reduce" else {"workload.steps": load.steps}
    rounds = "".join(f", {name}={count}" for name, count in many.items() if count > 1)
    return f"{scenario.ranks:,} ranks{parts}{rounds}"


def _remedy(scenario: Scenario) -> str:
    """Settings that would do, of those that count."""
    load = scenario.workload
    if load.algorithm not in ("ring", "direct"):
        return "fewer hosts (workload.ranks) or rounds are needed"
    pairs = 2 * scenario.ranks * (scenario.ranks - 1)
    turns = _workload(scenario, 0) // pairs if load.segment else _turns(scenario)
    most = math.isqrt(MOST_FLOWS // (2 * max(turns, 1)))
    other = "" if load.segment else ", or another algorithm, such as 'double_tree'"
    if load.segment and pairs * _turns(scenario) <= MOST_FLOWS:
        other = ", or a larger workload.segment"
    return (
        f"workload.ranks up to about {most:,} would do{other}"
        if most > 1
        else f"fewer rounds are needed{other}"
    )


def _turns(scenario: Scenario) -> int:
    """All-reduces, one after another or of one step's buckets."""
    load = scenario.workload
    if load.kind == "training":
        return load.steps * len(buckets(load_trace(load.model), load.bucket))
    return load.rounds


def _workload(scenario: Scenario, group: int) -> int:
    load, ranks = scenario.workload, scenario.ranks
    if load.kind == "flows":
        return load.flows
    if load.kind == "incast":
        return load.rounds * (ranks - 1)
    if load.kind == "permutation":
        return load.rounds * ranks
    if load.kind == "all_reduce":
        return load.rounds * _all_reduce(scenario, load.size, group)
    parts = buckets(load_trace(load.model), load.bucket)
    sizes = [max(round(part.nbytes * load.bytes_scale), 4) for part in parts]
    return load.steps * sum(_all_reduce(scenario, size, group) for size in sizes)


def _all_reduce(scenario: Scenario, nbytes: int, group: int) -> int:
    """Flows of one, see ``algorithms``."""
    load, n = scenario.workload, scenario.ranks
    if load.algorithm == "halving_doubling":
        return 2 * n * (n.bit_length() - 1)
    if load.algorithm == "double_tree":
        return 4 * SEGMENTS * (n - 1)
    if load.algorithm == "ps":
        return 2 * load.servers * (n - load.servers)
    if load.algorithm == "hierarchical":
        return 2 * n * (group - 1 + n // group - 1) if group else 0
    return 2 * n * (n - 1) * _parts(scenario, nbytes)


def _parts(scenario: Scenario, nbytes: int) -> int:
    """Parts in which a shard goes on, see ``algorithms._parts``."""
    chunk, segment = scenario.transport.payload, scenario.workload.segment
    chunks = -(-nbytes // chunk)
    largest = -(-chunks // scenario.ranks)
    return -(-largest // max(segment // chunk, 1)) if segment else 1


def _background(scenario: Scenario) -> float:
    spec = scenario.background
    if not spec.load or spec.sizes not in SIZES:
        return 0.0
    rate = spec.load * scenario.topology.host_link.rate * scenario.topology.host_count / 8.0
    return rate / mean_size(spec.sizes, spec.size) * spec.until
