"""The packet engine's outside: a scenario into arrays, the compiled loop, arrays into an Outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError
from dblp.sim.fabric.fit import check_fit, failed_links
from dblp.sim.fabric.graph import Floats, Ints, Tasks
from dblp.sim.fabric.kernel import state as k
from dblp.sim.fabric.outcome import Outcome
from dblp.sim.fabric.scenario import ON_OFF, Scenario
from dblp.sim.fabric.spec import CLASSES, check
from dblp.sim.fabric.splitting import fixed_loads, hashed_paths, pair_hashes, split, sprayed_loads
from dblp.sim.fabric.topology import Fabric, make_fabric
from dblp.sim.fabric.transports import TransportSpec, transport
from dblp.sim.fabric.workloads import make_tasks
from dblp.units import picoseconds

SLICE_EVENTS = 4_000_000
"""Events between two looks at the keyboard: about a second."""
FREE_PACKETS = 4096
"""At first; twice as many whenever they run out."""
SAMPLES = 256
MOST_SAMPLED_LINKS = 8_192
"""Of fabrics with more, only the largest backlogs are noted: samples would take longer than the run."""
FIRST_SAMPLE_PS = 1_000_000
BURST_BYTES = 65_507
"""Most that leaves in one call, see ``kernel.sender``."""
MESSAGE_PORTIONS = 4
"""Parts in which a message leaves at most while a hop works on it (``dblp.transport.outgoing.PORTIONS``)."""
FIXED_POLICIES = ("ecmp", "ethereal")
FLOW_FIELDS = np.dtype(
    [
        ("source", "i4"), ("target", "i4"), ("bytes", "i8"), ("cls", "i4"), ("leg", "i4"), ("ready_s", "f8"),
        ("start_s", "f8"), ("finish_s", "f8"), ("chunks", "i4"), ("missing", "i4"), ("lost", "i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A scenario with all that is drawn before it runs."""

    scenario: Scenario
    fabric: Fabric
    seed: int
    tasks: Tasks
    paths: Ints
    """Fixed path of each flow (T)."""
    ideal_loads: Floats
    """Bytes of each link if every flow were spread evenly (L)."""

    @property
    def planned_ratio(self) -> float:
        """Most loaded link between switches over that of ideal spraying, in bytes of fixed paths; NaN if paths are not
        fixed, or flows leave theirs since a link is cut."""
        inner, policy = self.fabric.fabric_links(), self.scenario.routing.policy
        left = any(cut.down and (cut.at > 0 or policy == "ecmp") for cut in self.scenario.failures)
        if policy not in FIXED_POLICIES or left or not self.ideal_loads[inner].any():
            return float("nan")
        loads = fixed_loads(self.tasks, self.fabric, self.paths)
        return float(loads[inner].max() / self.ideal_loads[inner].max())


def prepare() -> None:
    """Load the compiled loop; numba compiles it if it has not yet, and says so. Raises LocalError without numba."""
    import dblp.sim.fabric.kernel.loop  # noqa: F401


def check_packet(scenario: Scenario) -> None:
    """Raise ConfigError that names what the packet engine has not, or what does not fit together."""
    missing = {
        "workload.compression": scenario.workload.compression,
        "workload.compute": scenario.workload.compute,
        "rates": scenario.rates,
        "background.sizes": scenario.background.sizes == ON_OFF,
    }
    for field, wanted in missing.items():
        if wanted:
            raise ConfigError(f"{field}: the packet engine has no such thing: use the exact engine")
    check_fit(scenario)
    load = scenario.workload
    halving = load.kind in ("all_reduce", "training") and load.algorithm == "halving_doubling"
    power = scenario.ranks & (scenario.ranks - 1) == 0
    check(
        not halving or power, "workload.algorithm", load.algorithm, f"{scenario.ranks} ranks are no power of two"
    )  # fmt: skip


def make_plan(scenario: Scenario, seed: int) -> Plan:
    """Draw a scenario's flows and paths. Raises ConfigError if it does not fit together."""
    check_packet(scenario)
    fabric = make_fabric(scenario.topology)
    rng = np.random.default_rng(seed)
    tasks = make_tasks(scenario, fabric, rng)
    dead = np.zeros(len(fabric.sources), np.bool_)
    for failure, links in zip(scenario.failures, failed_links(scenario, fabric), strict=True):
        if failure.down and failure.at <= 0:
            dead[links] = True
    ideal = sprayed_loads(tasks, fabric, dead)
    if scenario.routing.policy == "ethereal":
        tasks, paths = split(tasks, fabric, dead, scenario.transport.payload, rng)
    else:
        paths = hashed_paths(tasks, fabric, rng)
        if scenario.transport.portions:  # from one port to one port, whatever the message
            paths = pair_hashes(fabric, seed)[tasks.source, tasks.target]
    return Plan(scenario=scenario, fabric=fabric, seed=seed, tasks=tasks, paths=paths, ideal_loads=ideal)


def run_packet(scenario: Scenario, seed: int = 0, *, sampled: bool = False) -> Outcome:
    """Run a scenario in the packet engine. ``sampled``: note the backlogs. Raises LocalError without numba, ConfigError."""
    return run_plan(make_plan(scenario, seed), sampled=sampled)


def run_plan(plan: Plan, *, sampled: bool = False) -> Outcome:
    """Run what was drawn. Raises LocalError without numba."""
    from dblp.sim.fabric.kernel.loop import run

    arrays = make_arrays(plan, sampled=sampled)
    until = int(picoseconds(plan.scenario.until))
    began = time.perf_counter()
    while True:
        reason = run(arrays.world(), until, SLICE_EVENTS)
        if reason in (k.MORE_PACKETS, k.MORE_TIMERS):
            arrays = _grown(arrays, reason)
        elif reason != k.PAUSED:
            break
    return _outcome(plan, arrays, reason, time.perf_counter() - began)


def make_arrays(plan: Plan, *, sampled: bool = False) -> k.Arrays:
    """All arrays of a run, at time 0."""
    scenario, fabric = plan.scenario, plan.fabric
    flows = _flows(plan)
    links = len(fabric.sources)
    meta = _meta(plan, flows)
    reps = scenario.routing.policy == "reps"
    sampled = sampled and links <= MOST_SAMPLED_LINKS
    order = np.argsort(plan.tasks.before, kind="stable")
    pairs = fabric.hosts**2 if any(spec.portions for spec in legs(scenario)) else 1
    arrays = k.Arrays(
        meta=meta,
        packets=_free_packets(int(meta[0]["free_count"])),
        flows=flows,
        chunks=np.zeros(max(int(flows["chunks"].sum()), 1), k.CHUNK),
        links=_links_array(fabric),
        queues=_empty(links * scenario.switch.queues),
        nodes=_nodes(fabric),
        rings=_empty(fabric.hosts * k.RINGS),
        classes=_classes(scenario),
        transports=_transports(scenario),
        heap=np.zeros(2 * links + 16, k.EVENT),
        timers=np.zeros(len(flows) + int(meta[0]["max_fan"]) + 4096, k.EVENT),
        changes=_changes(scenario, fabric),
        ups=fabric.ups,
        down=np.ascontiguousarray(fabric.down),
        successors=plan.tasks.after[order].astype(np.int32),
        cached=np.zeros((len(flows) if reps else 1, k.CACHED_PATHS), np.int32),
        counts=np.zeros((k.COUNTERS, 2), np.int64),
        random=np.array([plan.seed], np.uint64),
        series=np.zeros((SAMPLES if sampled else 0, links if sampled else 1), np.int32),
        paths=_paths(pairs),
        samples=np.zeros((pairs, k.SAMPLES_KEPT)),
        addresses=np.zeros(len(k.Arrays._fields) - 1, np.int64),
    )
    _first_events(arrays)
    return arrays


def _first_events(arrays: k.Arrays) -> None:
    """Flows that wait for nothing, changes of links, the first sample: sorted, so that they are a heap as they are."""
    ready = np.flatnonzero(arrays.flows["waiting"] == 0)
    at = [arrays.flows["latency"][ready], arrays.changes["at"]]
    value = [ready * k.EVENTS + k.START, np.arange(len(arrays.changes)) * k.EVENTS + k.LINK_CHANGE]
    deadline = arrays.transports["deadline"][arrays.flows["transport"][ready]]
    late = (deadline > 0) & (arrays.flows["chunks"][ready] > 0)
    at.append(deadline[late])
    value.append(ready[late] * k.EVENTS + k.DEADLINE)
    if len(arrays.series):
        at.append(np.array([FIRST_SAMPLE_PS]))
        value.append(np.array([k.SAMPLE]))
    times, values = np.concatenate(at), np.concatenate(value)
    order = np.argsort(times, kind="stable")
    count = len(order)
    arrays.timers["at"][:count] = times[order]
    arrays.timers["value"][:count] = values[order]
    arrays.timers["sequence"][:count] = np.arange(count)
    arrays.meta[0]["timers"] = count
    arrays.meta[0]["sequence"] = count


def _flows(plan: Plan) -> k.Array:
    """FLOW for each task."""
    scenario, tasks, fabric = plan.scenario, plan.tasks, plan.fabric
    specs = legs(scenario)
    flows = np.zeros(len(tasks.source), k.FLOW)
    for name in ("source", "target", "bytes", "cls", "timed"):
        flows[name] = getattr(tasks, name)
    flows["transport"] = tasks.leg
    flows["path"] = plan.paths
    flows["turn"] = np.random.default_rng([plan.seed, 1]).integers(fabric.paths, size=len(flows))
    flows["latency"] = np.round(tasks.latency_s * 1e12)
    flows["waiting"] = np.bincount(tasks.after, minlength=len(flows))
    flows["successors"] = np.bincount(tasks.before, minlength=len(flows))
    flows["first_successor"] = np.cumsum(flows["successors"]) - flows["successors"]
    for leg, spec in enumerate(specs):
        mine = np.flatnonzero((tasks.leg == leg) & (tasks.bytes > 0))
        _leg_fields(flows, mine, spec)
        rtt = fabric.base_rtts(tasks.source[mine], tasks.target[mine], spec.packet, spec.ack)
        flows["base_rtt"][mine] = np.round(rtt * 1e12)
    flows["message"] = _last_parts(tasks)
    most = [max(BURST_BYTES // spec.packet, 1) for spec in specs]
    whole = np.bincount(flows["message"], flows["chunks"], len(flows)).astype(np.int64)
    flows["portion"] = np.clip(whole // MESSAGE_PORTIONS, 1, np.array(most)[flows["transport"]])
    flows["first_chunk"] = np.cumsum(flows["chunks"]) - flows["chunks"]
    flows["highest"], flows["newest_sent"] = -1, -1
    flows["threshold"] = np.inf
    flows["alpha"], flows["slow_start"] = 1.0, 1
    flows["last_cut"] = -(1 << 60)
    for name in (
        "repair_head",
        "repair_tail",
        "out_head",
        "out_tail",
        "pull_next",
        "ring_next",
        "detour",
        "air_next",
        "part_head",
        "part_tail",
        "part_next",
    ):
        flows[name] = k.NONE
    return flows


def _last_parts(tasks: Tasks) -> Ints:
    """For each flow the last part of its message: itself, if it is whole."""
    last = np.arange(len(tasks.source))
    parts = np.flatnonzero((tasks.message > 0) & (tasks.bytes > 0))
    keys = np.stack([tasks.message[parts], tasks.source[parts], tasks.target[parts]])
    _, first_from_end, group = np.unique(keys[:, ::-1], axis=1, return_index=True, return_inverse=True)
    last[parts[::-1]] = parts[::-1][first_from_end][group.ravel()]
    return last


def _leg_fields(flows: k.Array, mine: Ints, spec: TransportSpec) -> None:
    """Chunks of the flows of one transport, and how many of them are needed, critical, droppable."""
    chunks = -(-flows["bytes"][mine] // spec.payload)
    flows["chunks"][mine] = chunks
    missing = np.floor(chunks * spec.loss_bound + 1e-9).astype(np.int64) if spec.stop != "all" else 0
    flows["need"][mine] = np.maximum(chunks - missing, 1)
    flows["critical"][mine] = np.ceil(chunks * spec.critical_share - 1e-9)
    flows["droppable"][mine] = np.floor(chunks * spec.droppable_share + 1e-9)


def legs(scenario: Scenario) -> tuple[TransportSpec, ...]:
    """Transport of each leg, see ``Tasks.leg``."""
    own = scenario.transport
    burst = transport("open", packet=own.packet, header=own.header, ack=own.ack)
    return own, scenario.second_leg, scenario.background.transport, burst


def _transports(scenario: Scenario) -> k.Array:
    rows = np.zeros(len(legs(scenario)), k.TRANSPORT)
    for row, spec in zip(rows, legs(scenario), strict=True):
        for name in ("min_rto", "target", "deadline", "flow_target"):
            row[name] = picoseconds(getattr(spec, name))
        for name in (
            "target_rtts",
            "stall_rtts",
            "packet",
            "payload",
            "ack",
            "max_timeouts",
            "ecn",
            "portions",
            "card",
        ):
            row[name] = getattr(spec, name)
        row["first_window"] = spec.initial_window
        row["control"] = k.CONTROL_CODES[spec.control]
        row["recovery"] = k.RECOVERY_CODES[spec.recovery]
        row["stop"] = k.STOP_CODES[spec.stop]
        row["by_remaining"] = spec.priority == "remaining"
    return rows


def _classes(scenario: Scenario) -> k.Array:
    rows = np.zeros(2 * k.TWINS, k.CLASS)
    for droppable in (False, True):
        for number in range(CLASSES):
            spec = scenario.switch.of_class(number, droppable=droppable)
            row = rows[number + k.TWINS * droppable]
            row["mark_min"], row["mark_max"] = spec.mark_min, spec.mark_max or spec.mark_min
            row["drop"], row["mark_share"], row["queue"] = spec.drop, spec.mark_share, spec.queue
    return rows


def _meta(plan: Plan, flows: k.Array) -> k.Array:
    scenario, fabric = plan.scenario, plan.fabric
    meta = np.zeros(1, k.META)
    row = meta[0]
    most = max(_train_packets(spec) for spec in legs(scenario))
    row["most_packets"] = k.MARGIN + 4 * scenario.topology.planes + most
    row["free_count"], row["free_head"] = FREE_PACKETS + 16 * most, 0
    row["timed_left"] = flows["timed"].sum()
    row["sample_every"] = FIRST_SAMPLE_PS
    row["buffer"], row["header"] = scenario.switch.buffer, scenario.switch.header
    row["shared"], row["push_out"], row["trim"] = (
        scenario.switch.shared,
        scenario.switch.push_out,
        scenario.switch.trim,
    )
    row["alpha"] = scenario.switch.alpha
    row["hosts"], row["paths"], row["planes"] = fabric.hosts, fabric.paths, scenario.topology.planes
    row["link_count"], row["series_rows"] = len(fabric.sources), SAMPLES
    row["queues"] = scenario.switch.queues
    row["policy"] = k.POLICY_CODES[scenario.routing.policy]
    row["freeze"] = picoseconds(scenario.routing.freeze)
    row["max_fan"] = 2 * flows["successors"].max() + 64 + 2 * most  # a packet may arm two
    return meta


def _train_packets(spec: TransportSpec) -> int:
    """Packets that leave a card at once: a train of those that send in portions, a window of others up to what is free."""
    if spec.portions:
        return k.TRAIN_BURSTS * max(BURST_BYTES // spec.packet, 1)
    return 1 if spec.card else 0


def _links_array(fabric: Fabric) -> k.Array:
    rows = np.zeros(len(fabric.sources), k.LINK)
    rows["source"], rows["target"] = fabric.sources, fabric.targets
    rows["ps_per_byte"] = 8e12 / fabric.rates
    rows["delay"] = np.round(fabric.delays * 1e12)
    rows["fly_head"] = rows["fly_tail"] = k.NONE
    rows["up"] = rows["known"] = 1
    rows["unlimited"] = fabric.sources < fabric.hosts
    return rows


def _nodes(fabric: Fabric) -> k.Array:
    rows = np.zeros(len(fabric.names), k.NODE)
    rows["up_first"], rows["up_count"], rows["stride"] = fabric.up_first, fabric.up_count, fabric.strides
    rows["pull_head"] = rows["pull_tail"] = k.NONE
    rows["turn"] = np.arange(len(rows))
    rows["peer"][: fabric.hosts] = (
        np.arange(fabric.hosts) + 1
    ) % fabric.hosts  # else all might turn to the same one first
    return rows


def _changes(scenario: Scenario, fabric: Fabric) -> k.Array:
    """Each failure begins and may end; of a cut link, routing learns ``detect`` later, at once of one that was cut from the
    start."""
    rows: list[tuple[float, float, int, int, bool, bool]] = []
    for failure, links in zip(scenario.failures, failed_links(scenario, fabric), strict=True):
        detect = scenario.routing.detect if failure.at > 0 else 0.0
        for link in links:
            loss = 0.0 if failure.down else failure.loss
            rows.append((failure.at, loss, link, 0, failure.down, failure.data_only))
            rows += [(failure.at + detect, 0.0, link, 1, True, False)] * failure.down
            if failure.until:
                rows.append((failure.until, 0.0, link, 0, False, False))
                known = failure.until + scenario.routing.detect
                rows += [(known, 0.0, link, 1, False, False)] * failure.down
    changes = np.zeros(len(rows), k.CHANGE)
    for row, (at, *values) in zip(changes, rows, strict=True):
        row["at"] = picoseconds(at)
        row["loss"], row["link"], row["action"], row["down"], row["spare_control"] = values
    return changes


def _empty(count: int) -> k.Array:
    rows = np.zeros(count, k.QUEUE)
    rows["head"] = rows["tail"] = k.NONE
    return rows


def _paths(count: int) -> k.Array:
    rows = np.zeros(count, k.PATH)
    rows["head"] = rows["tail"] = rows["air_head"] = k.NONE
    return rows


def _free_packets(count: int, first: int = 0, beyond: int = k.NONE) -> k.Array:
    """Packets in one free list; the last one's next is ``beyond``."""
    rows = np.zeros(count, k.PACKET)
    rows["next"] = np.arange(first + 1, first + count + 1)
    rows["next"][-1] = beyond
    return rows


def _grown(arrays: k.Arrays, reason: int) -> k.Arrays:
    """Twice as much room where there was too little."""
    if reason == k.MORE_TIMERS:
        return arrays._replace(timers=np.concatenate([arrays.timers, np.zeros_like(arrays.timers)]))
    count = len(arrays.packets)
    more = _free_packets(count, count, int(arrays.meta[0]["free_head"]))
    arrays.meta[0]["free_head"] = count
    arrays.meta[0]["free_count"] += count
    return arrays._replace(packets=np.concatenate([arrays.packets, more]))


def _outcome(plan: Plan, arrays: k.Arrays, reason: int, wall_s: float) -> Outcome:
    meta = arrays.meta[0]
    rows = int(meta["sample_row"])
    every = int(meta["sample_every"]) * 1e-12
    names = k.COUNTER_NAMES
    ratio = plan.planned_ratio
    flows = _flow_table(plan.tasks, arrays.flows)
    return Outcome(
        engine="packet",
        seed=plan.seed,
        ended=_ending(arrays, reason),
        times_s=_times(plan.tasks, arrays.flows),
        flows=flows,
        missing_share=float(flows["missing"].sum() / max(flows["chunks"].sum(), 1)),
        link_names=tuple(plan.fabric.name(link) for link in range(len(arrays.links))),
        link_bytes=arrays.links["data_bytes"].copy(),
        link_peak=arrays.links["peak"].copy(),
        max_load_ratio=_sent_ratio(plan, arrays) if np.isnan(ratio) else ratio,
        counts={name: (int(row[0]), int(row[1])) for name, row in zip(names, arrays.counts, strict=True)},
        queued=_under_way(arrays),
        hops=int(meta["hops"]),
        events=int(meta["events"]),
        simulated_s=int(meta["now"]) * 1e-12,
        wall_s=wall_s,
        series_s=np.arange(1.0, rows + 1) * every,
        series=arrays.series[:rows],
    )


def _ending(arrays: k.Arrays, reason: int) -> str:
    if reason == k.TIME_OVER:
        return "until"
    return "failed" if arrays.meta[0]["timed_failed"] or reason == k.NOTHING_LEFT else "done"


def _seconds(times: npt.NDArray[Any], flows: k.Array) -> Floats:
    return np.where(flows["state"] == k.DONE, times * 1e-12, np.nan)


def _times(tasks: Tasks, flows: k.Array) -> Floats:
    finished = _seconds(flows["finished_at"], flows)
    if tasks.per_flow:
        mine = tasks.timed & (tasks.bytes > 0)
        return np.asarray(finished[mine] - flows["start_at"][mine] * 1e-12)
    return np.array([finished[ends].max() - finished[starts].max() for starts, ends in tasks.rounds])


def _flow_table(tasks: Tasks, flows: k.Array) -> npt.NDArray[Any]:
    mine = np.flatnonzero(tasks.timed & (flows["chunks"] > 0))
    table = np.zeros(len(mine), FLOW_FIELDS)
    for name in ("source", "target", "bytes", "cls", "chunks", "lost"):
        table[name] = flows[name][mine]
    table["leg"] = flows["transport"][mine]
    for name, column in (("ready_s", "ready_at"), ("start_s", "start_at"), ("finish_s", "finished_at")):
        table[name] = _seconds(flows[column], flows)[mine]
    table["missing"] = (flows["chunks"] - flows["received"])[mine]
    return table


def _sent_ratio(plan: Plan, arrays: k.Arrays) -> float:
    """Most loaded link between switches over the most loaded one of ideal spraying, in shares of the sum."""
    inner = plan.fabric.fabric_links()
    sent, ideal = arrays.links["data_bytes"][inner], plan.ideal_loads[inner]
    if not len(sent) or not sent.sum() or not ideal.sum():
        return float("nan")
    return float(sent.max() / sent.sum() / (ideal.max() / ideal.sum()))


def _under_way(arrays: k.Arrays) -> tuple[int, int]:
    """Data and control packets that wait or fly."""
    data = 0
    heads = np.concatenate([arrays.queues["head"], arrays.links["fly_head"]])
    total = len(arrays.packets) - int(arrays.meta[0]["free_count"])
    for head in heads[heads != k.NONE].tolist():
        while head != k.NONE:
            data += int(arrays.packets[head]["kind"] == k.DATA)
            head = int(arrays.packets[head]["next"])
    return data, total - data
