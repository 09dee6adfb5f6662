"""Running an experiment: the network, the ranks in it, and all arms in turn, block by block, over the same connections.

Theory of operation. Every rank is one process that holds the connections of all arms, made on the clean network, TCP's under
the arm's own congestion control. Then the schedule begins, and runs by the wall clock until the end. Arms take turns: each does
a block of rounds while the others are idle; the order turns from block to block. The kernel's counters are read around each
block, so that losses belong to arms. A round is as long as from its first rank's start to its last rank's end, on
CLOCK_MONOTONIC, which all processes of a host share; so rounds and bursts have one clock too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dblp.sim.lab import claim
from dblp.sim.lab.arms import Arm
from dblp.sim.lab.counters import Counters
from dblp.sim.lab.experiment import Experiment
from dblp.sim.lab.impairments import Applied
from dblp.sim.lab.namespaces import run_in
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.ranks import MASTER_PORT, Event, OnEvent, RankError, Ranks
from dblp.sim.lab.sniff import sniffing
from dblp.sim.lab.tools import LabError
from dblp.sim.lab.traffic import CrossTraffic

_CONNECT_S = 300.0
"""For a group to meet on the clean network, imports of torch included."""
_TRAIN_S = 6 * 3600.0
"""Most that a training run may take before it counts as hung."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Some rounds of one arm and size, one after the other."""

    arm: str
    nbytes: int
    starts: Floats
    """(rounds,) CLOCK_MONOTONIC of the first rank's start."""
    seconds: Floats
    """(rounds,) to the last rank's end."""
    cpu_s: float
    """Processor time of all ranks in these rounds."""
    sent: int = 0
    """Chunks (dblp) or segments (TCP) that left, repeats not counted."""
    resent: int = 0
    """Repeats."""
    missing: int = 0
    """Chunks that receivers did without."""
    bounded: int = 0
    """Chunks that they might have done without."""
    counters: Counters = field(default_factory=Counters)
    """What happened to the packets meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training run of one arm."""

    arm: str
    seed: int
    events: tuple[Event, ...]
    """Each rank's result, by rank."""
    counters: Counters
    start_s: float
    """CLOCK_MONOTONIC."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of an experiment; also of one that failed, as far as it came."""

    experiment: Experiment
    blocks: list[Block] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    spans: Sequence[Applied] = ()
    """What the schedule did, and when."""
    start_s: float = 0.0
    """CLOCK_MONOTONIC when the schedule began."""
    wall_s: float = 0.0
    """From then to the end."""
    means: dict[str, str] = field(default_factory=dict)
    """How the kernel did it."""
    failed: str = ""
    """Why the run proves nothing; empty: it does."""

    @property
    def measured(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.blocks or self.trained)


class Watch(Protocol):
    """Hears how far a run is."""

    def stage(self, text: str) -> None:
        """Something begins."""

    def means(self, means: Mapping[str, str]) -> None:
        """The network is there, and is impaired so."""

    def block(self, arm: str, nbytes: int, done: int, rounds: int) -> None:
        """An arm has done so many of its rounds of a size."""

    def event(self, rank: int, event: Event) -> None:
        """A rank reports something in a training run."""


Build = Callable[[Any], LabNetwork]


def run_experiment(
    experiment: Experiment,
    watch: Watch,
    *,
    build: Build = LabNetwork,
    capture: tuple[str, int] | None = None,
    run: Run | None = None,
) -> Run:
    """Run it to its end; ``capture``: a file, and the host whose datagrams go there; ``run``: where to put what is measured, so
    that it is not lost with what is raised; ``failed`` says why it ended then.

    Raises PrivilegeError without root, LabError for what the kernel cannot do, RankError where a rank fails. A run that ends
    without the loss that it claims comes back with ``failed``.
    """
    run = run if run is not None else Run(experiment=experiment)
    try:
        _run(run, watch, build, capture)
    except BaseException as error:
        run.failed = _ended(error)
        raise
    run.failed = claim.check(experiment.schedule, run)
    return run


def _ended(error: BaseException) -> str:
    """Why a run did not come to its end."""
    interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
    return "it was interrupted before its end" if interrupted else f"it ended before its end: {error}"


def _run(run: Run, watch: Watch, build: Build, capture: tuple[str, int] | None) -> None:
    experiment = run.experiment
    watch.stage("building the network")
    with build(experiment.topology) as net:
        schedule = experiment.schedule
        run.means = _means(net, str(schedule))
        watch.means(run.means)
        net.apply(schedule.base)  # refused now, not after a minute, where the kernel cannot do it
        net.apply(type(schedule.base)())
        with Ranks(net) as ranks:
            watch.stage(f"starting {len(ranks)} ranks")
            ranks.command({"do": "join"}, timeout_s=_CONNECT_S)
            if experiment.train is None:
                _connect_all(experiment, net, ranks, watch)
            net.apply(schedule.base)
            with _capturing(net, capture), _crossing(net, experiment), net.playing(schedule) as spans:
                run.spans, run.start_s = spans, time.monotonic()
                try:
                    _work(run, net, ranks, watch)
                finally:
                    run.wall_s = time.monotonic() - run.start_s


def _means(net: LabNetwork, schedule: str) -> dict[str, str]:
    means = net.means
    return {
        "loss": means.loss or "none",
        "rate": "tbf" if means.tbf else "none",
        "delay": "netem" if means.netem else "none",
        "why": means.why,
        "schedule": schedule,
    }


def _capturing(net: LabNetwork, capture: tuple[str, int] | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if capture is None else sniffing(net, net.hosts[capture[1]], capture[0])


def _crossing(net: LabNetwork, experiment: Experiment) -> contextlib.AbstractContextManager[object]:
    traffic = experiment.traffic
    return contextlib.nullcontext() if traffic is None else CrossTraffic(net, traffic)


def _connect_all(experiment: Experiment, net: LabNetwork, ranks: Ranks, watch: Watch) -> None:
    """Each arm's group, on the clean network; TCP keeps the congestion control that its route had."""
    for arm in experiment.arms:
        watch.stage(f"connecting {arm.name}")
        command = {
            "do": "connect",
            "arm": arm.name,
            "sizes": list(experiment.sizes),
            "algorithm": experiment.algorithm,
            "timeout_s": experiment.timeout_s,
        }
        with _congestion(net, arm):
            ranks.command(command, timeout_s=_CONNECT_S)


@contextlib.contextmanager
def _congestion(net: LabNetwork, arm: Arm) -> Iterator[Callable[[], None]]:
    """New connections take the arm's congestion control; at the end it is looked at whether they did, or when what is yielded is
    called, which raises LabError."""
    if not arm.congestion:
        yield lambda: None
        return
    net.set_congestion(arm.congestion)
    before, looked = connections(net), False

    def look() -> None:
        nonlocal looked
        if not looked:
            looked = True
            check_congestion(arm, before, connections(net))

    yield look
    look()


Connections = Mapping[tuple[str, str], Sequence[str]]


def connections(net: LabNetwork) -> Connections:
    """TCP's connections on the hosts, by both ends, with the words of ss on each; without those of the ranks' store, which carry
    no gradients."""
    found: dict[tuple[str, str], Sequence[str]] = {}
    for host in net.hosts:
        asked = ["--tcp", "--info", "--numeric", "--oneline", "--no-header", "state", "established"]
        for line in run_in(host.namespace, ["ss", *asked]).strip().splitlines():
            _, _, local, peer, *words = line.split()  # two counts of queued bytes come first
            if not {local.rpartition(":")[2], peer.rpartition(":")[2]} & {str(MASTER_PORT)}:
                found[local, peer] = words
    return found


def check_congestion(arm: Arm, before: Connections, after: Connections) -> None:
    """Raise LabError unless all connections that an arm made use its congestion control, and there are some."""
    made = {ends: words for ends, words in after.items() if ends not in before}
    other = [ends for ends, words in made.items() if arm.congestion not in words]
    if other:
        local, peer = other[0]
        raise LabError(
            f"{arm.name}: {len(other)} of its {len(made)} connections do not use {arm.congestion}, as that of {local} to {peer}: "
            f"{' '.join(made[other[0]])[:200]}"
        )
    if not made:
        raise LabError(
            f"{arm.name}: its ranks made no connection whose congestion control could be looked at"
        )


def _work(run: Run, net: LabNetwork, ranks: Ranks, watch: Watch) -> None:
    if run.experiment.train is not None:
        _train_all(run, net, ranks, watch)
        return
    for nbytes in run.experiment.sizes:
        _measure(run, nbytes, net, ranks, watch)


def _measure(run: Run, nbytes: int, net: LabNetwork, ranks: Ranks, watch: Watch) -> None:
    """All arms' rounds of a size, a block at a time."""
    experiment = run.experiment
    arms = [arm.name for arm in experiment.arms]
    blocks = -(-experiment.rounds // experiment.block)
    done = dict.fromkeys(arms, 0)
    for number in range(blocks):
        rounds = min(experiment.block, experiment.rounds - number * experiment.block)
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            watch.block(arm, nbytes, done[arm], experiment.rounds)

            def on_event(rank: int, event: Event, arm: str = arm) -> None:
                watch.block(arm, nbytes, done[arm] + event["done"], experiment.rounds)

            run.blocks.append(_block(experiment, arm, nbytes, rounds, net, ranks, on_event))
            done[arm] += len(run.blocks[-1].seconds)
            watch.block(arm, nbytes, done[arm], experiment.rounds)


def _block(
    experiment: Experiment,
    arm: str,
    nbytes: int,
    rounds: int,
    net: LabNetwork,
    ranks: Ranks,
    on_event: OnEvent,
) -> Block:
    slow = experiment.slow
    command = {
        "do": "block",
        "arm": arm,
        "bytes": nbytes,
        "rounds": rounds,
        "seconds": experiment.seconds,
        "slow_rank": slow.rank if slow else -1,
        "slow_s": slow.by_s if slow else 0.0,
    }
    before = net.counters()
    timeout_s = experiment.seconds + 2 * experiment.timeout_s
    events = ranks.command(command, timeout_s=timeout_s, on_event=on_event)
    after = net.counters()
    _check_replicas(arm, events)
    return block_of(arm, nbytes, events, after - before)


def block_of(arm: str, nbytes: int, events: Sequence[Event], counters: Counters) -> Block:
    """Put the ranks' stamps and counts of a block together."""
    starts = np.array([event["starts"] for event in events], np.float64).min(axis=0)
    ends = np.array([event["ends"] for event in events], np.float64).max(axis=0)
    totals = {name: sum(event[name] for event in events) for name in ("sent", "resent", "missing", "bounded")}
    return Block(
        arm=arm,
        nbytes=nbytes,
        starts=starts,
        seconds=ends - starts,
        cpu_s=sum(event["cpu_s"] for event in events),
        counters=counters,
        **totals,
    )


def _check_replicas(arm: str, events: Sequence[Event]) -> None:
    """Ranks that must agree hold the same bits after each round (contract C3)."""
    sums = [event["checksums"] for event in events]
    if any(other != sums[0] for other in sums):
        raise RankError(f"{arm}: ranks hold different results after a round that must leave them equal")


def _train_all(run: Run, net: LabNetwork, ranks: Ranks, watch: Watch) -> None:
    """Every arm with every seed; the order of the arms turns with the seed."""
    training = run.experiment.train
    assert training is not None
    arms = list(run.experiment.arms)
    for number, seed in enumerate(training.seeds):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            watch.stage(f"training over {arm.name}, seed {seed}")
            run.trained.append(_train(run.experiment, arm, seed, net, ranks, watch))


def _train(
    experiment: Experiment, arm: Arm, seed: int, net: LabNetwork, ranks: Ranks, watch: Watch
) -> Trained:
    training = experiment.train
    assert training is not None
    command = {
        "do": "train",
        "arm": arm.name,
        "seed": seed,
        "model": training.model,
        "data": training.data,
        "data_dir": training.data_dir,
        "epochs": training.epochs,
        "batch": training.batch,
        "timeout_s": experiment.timeout_s,
    }
    results: dict[int, Event] = {}
    with _congestion(net, arm) as look:

        def on_event(rank: int, event: Event) -> None:
            look()  # while it trains: its connections end with it
            if event["kind"] == "result":
                results[rank] = event
            else:
                watch.event(rank, {**event, "arm": arm.name})

        before, start = net.counters(), time.monotonic()
        ranks.command(command, timeout_s=_TRAIN_S, on_event=on_event)
    events = tuple(results[rank] for rank in sorted(results))
    return Trained(arm=arm.name, seed=seed, events=events, counters=net.counters() - before, start_s=start)
