"""Sweeps: the cases of an experiment in as many processes as asked for, or on a Ray cluster, resumable; and their records.

Each case has its own seed and shares nothing, so results don't depend on the number of processes or machines. With a folder,
each result is written there when it comes, and a later sweep takes it from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from dblp.errors import LocalError
from dblp.sim.fabric.cluster import run_on_ray
from dblp.sim.fabric.experiment import Case, Claim, Experiment, Point, measure
from dblp.sim.fabric.outcome import Outcome
from dblp.sim.fabric.packet import MOST_SAMPLED_LINKS, prepare, run_packet
from dblp.sim.fabric.reaction import reactions

SHOWN_HOSTS = 64
"""Hosts that a picture shows, the first: their flows, and the loads of their links."""
SEEN_SHARE = 0.002
"""Of a run: gaps between flows that are too short to be seen in a picture."""
SHOWN_LINKS = 8
HELP_AFTER_S = 4.0
"""Time after which further processes join a sweep. About what one takes to start and to load the machine code: a sweep that is
done before is slower with it."""
_LOOK_S = 0.1
"""Time between two looks whether the sweep is to end."""
MOST_TIMES = 100_000
"""Times that a result keeps: more say no more about percentiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What is kept of a run."""

    key: str
    """The case's."""
    policy: str
    point: Point
    seed: int
    hosts: int
    ended: str
    """See Outcome."""
    times_s: tuple[float, ...]
    """See Outcome."""
    max_load_ratio: float
    missing_share: float
    counts: Mapping[str, tuple[int, int]]
    hops: int
    wall_s: float
    picture: Mapping[str, Any]
    """What its pictures show; empty unless asked for."""
    rounds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """See Outcome."""


def run_case(case: Case, pictured: bool = False) -> CaseResult:
    """Run one case, in this process."""
    scenario = case.scenario
    if case.engine == "exact":
        from dblp.sim.fabric.exact import run_exact

        outcome = run_exact(scenario, case.seed)
    else:
        outcome = run_packet(scenario, case.seed, sampled=pictured)
    return CaseResult(
        key=case.key,
        policy=case.policy,
        point=case.point,
        seed=case.seed,
        hosts=scenario.ranks,
        ended=outcome.ended,
        times_s=tuple(outcome.times_s[:MOST_TIMES].tolist()),
        max_load_ratio=outcome.max_load_ratio,
        missing_share=outcome.missing_share,
        counts=outcome.counts,
        hops=outcome.hops,
        wall_s=outcome.wall_s,
        picture=_picture(outcome) if pictured else {},
        rounds=outcome.rounds,
    )


def _picture(outcome: Outcome) -> dict[str, Any]:
    """The busiest ports' backlogs, sampled or, without samples, the largest; the loads of all links; when hosts were sending;
    what of it the engine did not note."""
    inner = [n for n, name in enumerate(outcome.link_names) if not name.startswith("h")]
    peaks = outcome.series[:, inner].max(axis=0) if outcome.series.size else outcome.link_peak[inner]
    shown = [inner[n] for n in np.argsort(-peaks, kind="stable")[:SHOWN_LINKS]]
    exact = outcome.engine == "exact"
    return {
        "unsampled": "" if outcome.series.size else _UNSAMPLED[exact],
        "no_flows": "the exact engine notes no flows" if exact else "",
        "peaks": {outcome.link_names[n]: int(outcome.link_peak[n]) for n in shown},
        "series_s": outcome.series_s.tolist(),
        "series": {outcome.link_names[n]: outcome.series[:, n].tolist() for n in shown}
        if outcome.series.size
        else {},
        "loads": dict(zip(outcome.link_names, outcome.link_bytes.tolist(), strict=True)),
        "flows": _sending(outcome.flows),
    }


_UNSAMPLED = {
    True: "the exact engine samples no backlogs",
    False: f"not sampled: more than {MOST_SAMPLED_LINKS:,} links, or over before",
}


def _sending(flows: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    """From when to when each host had a flow of each leg under way: flows that overlap, or nearly meet, are one row. Those whose
    deadline was over before they could start have a start of 0, and neither bytes that came nor any that were lost."""
    never = (flows["start_s"] == 0.0) & (flows["missing"] == flows["chunks"]) & (flows["lost"] == 0)
    ended = np.isfinite(flows["start_s"]) & np.isfinite(flows["finish_s"])
    shown = flows[(flows["source"] < SHOWN_HOSTS) & ended & ~never]
    rows: list[list[Any]] = []
    if len(shown):
        gap = SEEN_SHARE * float(shown["finish_s"].max() - shown["start_s"].min())
        order = np.lexsort((shown["start_s"], shown["leg"], shown["source"]))
        columns = (shown[name][order].tolist() for name in ("source", "leg", "start_s", "finish_s"))
        for source, leg, start, finish in zip(*columns, strict=True):
            if rows and rows[-1][:2] == [source, leg] and start <= rows[-1][3] + gap:
                rows[-1][3] = max(rows[-1][3], finish)
            else:
                rows.append([source, leg, start, finish])
    return {
        name: [row[at] for row in rows] for at, name in enumerate(("source", "leg", "start_s", "finish_s"))
    }


def run_cases(
    cases: Sequence[Case],
    *,
    processes: int = 1,
    folder: Path | None = None,
    pictured: Callable[[Case], bool] = lambda case: False,
    initializer: Callable[..., object] | None = None,
    initargs: tuple[Any, ...] = (),
    ray: str = "",
) -> Generator[CaseResult, None, None]:
    """The results as they come; closed early, it ends those that run and keeps those that have come. ``folder``: of results, read
    first and written to; ``initializer``: called in each new process; ``ray``: address of a cluster that runs them instead
    (``cluster.check_address``).

    Raises what a case raises, and LocalError if a process is killed or the cluster is not there.
    """
    left = []
    for case in cases:
        known = _read(folder, case)
        if known is None or (pictured(case) and not known.picture):
            left.append(case)
        else:
            yield known
    if ray:
        for result in run_on_ray(left, ray, pictured):
            _write(folder, result)
            yield result
    else:
        helpers = _Helpers(deque(left), min(processes, len(left)), pictured, initializer, initargs)
        try:
            for result in _run_all(left, helpers):
                _write(folder, result)
                yield result
        finally:
            helpers.stop()
            for result in helpers.kept():
                _write(folder, result)


def _run_all(cases: Sequence[Case], helpers: _Helpers) -> Iterator[CaseResult]:
    """The results of this process and its helpers, as they come."""
    if any(case.engine == "packet" for case in cases):
        prepare()  # once, or each process would compile for itself
    if helpers.processes > 1:
        helpers.start()
    try:
        while not helpers.began.is_set() and (mine := helpers.next()) is not None:
            yield run_case(mine, helpers.pictured(mine))
        helpers.alone.set()
        while helpers.is_alive():
            helpers.join(_LOOK_S)
            yield from helpers.finished()
        yield from helpers.finished()
    except BrokenProcessPool:
        raise LocalError(
            "a process of the sweep was killed, perhaps for want of memory: see dmesg, or run it with --processes 1"
        ) from None


class _Helpers(threading.Thread):
    """Processes that take over after ``HELP_AFTER_S``: a sweep that is over by then is quicker without them. The case that this
    process is at then, it runs to its end: till then one of them less works, so never more than ``processes`` do."""

    def __init__(
        self,
        left: deque[Case],
        processes: int,
        pictured: Callable[[Case], bool],
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
    ) -> None:
        super().__init__(name="dblp-sweep", daemon=True)
        self.processes, self.pictured = processes, pictured
        self._left = left
        self._initializer, self._initargs = initializer, initargs
        self.began, self.alone = threading.Event(), threading.Event()
        """Set by the helpers when they take over, and for them when this process runs no case any more."""
        self._ending = threading.Event()
        self._ended: SimpleQueue[Future[CaseResult]] = SimpleQueue()

    def run(self) -> None:
        """Thread body: keep the processes busy until no case is left. Processes that die with the thread that made them may
        not outlive it, so it waits for them."""
        self.alone.wait(HELP_AFTER_S)
        if not self._left or self._ending.is_set():
            return
        self.began.set()
        context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads and locks
        others = set(multiprocessing.active_children())
        try:
            with ProcessPoolExecutor(
                max(min(self.processes, len(self._left)), 1), context, initializer=self._initializer, initargs=self._initargs
            ) as pool:  # fmt: skip
                self._feed(pool)
                if self._ending.is_set():
                    for process in set(multiprocessing.active_children()) - others:
                        process.terminate()
        except Exception as error:  # it is raised where the results are taken
            failed: Future[CaseResult] = Future()
            failed.set_exception(error)
            self._ended.put(failed)

    def _feed(self, pool: ProcessPoolExecutor) -> None:
        running: set[Future[CaseResult]] = set()
        while not self._ending.is_set():
            room = self.processes if self.alone.is_set() else self.processes - 1
            while len(running) < room and (case := self.next()) is not None:
                running.add(pool.submit(run_case, case, self.pictured(case)))
            if not running:
                return
            ended, running = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                self._ended.put(future)

    def next(self) -> Case | None:
        """The next case, if there is one; two threads ask."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def finished(self) -> Iterator[CaseResult]:
        """Results that have come and were not taken; raises what a case raised."""
        while True:
            try:
                yield self._ended.get_nowait().result()
            except Empty:
                return

    def kept(self) -> Iterator[CaseResult]:
        """Those that have come after all; without what was raised, as something else has ended the sweep."""
        while not self._ended.empty():
            future = self._ended.get()
            if future.exception() is None:
                yield future.result()

    def stop(self) -> None:
        """Begin no further case, and end those that run."""
        self._ending.set()
        self.alone.set()
        if self.is_alive():
            self.join()


def _read(folder: Path | None, case: Case) -> CaseResult | None:
    path = folder / f"{case.key}.json" if folder is not None else None
    if path is None:
        return None
    try:
        table = json.loads(path.read_text())
        return CaseResult(**{
            **table,
            "policy": case.policy,
            "point": case.point,
            "times_s": tuple(math.nan if t is None else t for t in table["times_s"]),
            "max_load_ratio": math.nan if table["max_load_ratio"] is None else table["max_load_ratio"],
            "missing_share": math.nan if table["missing_share"] is None else table["missing_share"],
            "counts": {name: tuple(pair) for name, pair in table["counts"].items()},
            "rounds": {
                name: tuple(math.nan if value is None else value for value in values)
                for name, values in table["rounds"].items()
            },
        })  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LocalError(
            f"{path}: cannot be read: {error.strerror}. Remedy: remove it, or name another folder"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise LocalError(f"{path}: not a result of this version: remove it") from None


def _write(folder: Path | None, result: CaseResult) -> None:
    """By way of a file beside it, so that a sweep that is killed leaves whole results only. Raises LocalError."""
    if folder is None:
        return
    table = asdict(result)
    table["times_s"] = [none_for_nan(t) for t in result.times_s]
    table["max_load_ratio"] = none_for_nan(result.max_load_ratio)
    table["missing_share"] = none_for_nan(result.missing_share)
    table["picture"] = _plain(result.picture)
    table["rounds"] = {
        name: [none_for_nan(value) for value in values] for name, values in result.rounds.items()
    }
    beside = folder / f"{result.key}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(table, allow_nan=False))
        beside.rename(folder / f"{result.key}.json")
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise LocalError(
            f"{beside}: cannot be written: {error.strerror}. Remedy: free its disk, make it writable, or name another folder; "
            "what was written before is kept there"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return none_for_nan(value) if isinstance(value, float) else value


def none_for_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def records(experiment: Experiment, results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """One flat record for each arm and point, all seeds together: means, but for ``completion_sd_s``, the standard deviation of
    the seeds' means (None of one seed), ``max_link_load_ratio``, the largest of all seeds (None where no seed has one: see
    ``Outcome.max_load_ratio``), and ``missing_share``, None if it is unknown of one; ``ours``: of the arm's first claim,
    ``paper`` where that is of this point, or of the best of all."""
    rows = []
    for point in experiment.points():
        for arm in experiment.arms:
            mine = [r for r in results if r.policy == arm.policy and r.point == point]
            if mine:
                rows.append(_record(experiment, arm.policy, point, sorted(mine, key=lambda r: r.seed)))
    for point in experiment.points():
        for arm in experiment.arms:
            row = row_at(experiment, rows, arm.policy, point)
            claim = next((c for c in experiment.claims if c.policy == arm.policy), None)
            if row is not None:
                row["paper"] = claim.paper if claim is not None and claim.is_of(point) else None
                row["ours"] = _against(experiment, rows, claim, point) if claim is not None else None
    return rows


def runs(experiment: Experiment, results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """One flat record for each run, arm by arm and seed by seed at each point: what the means of ``records`` are made of."""
    order = {arm.policy: number for number, arm in enumerate(experiment.arms)}
    points = list(experiment.points())
    return [
        {
            "policy": r.policy,
            **experiment.values(r.policy, r.point),
            "seed": r.seed,
            "ended": r.ended,
            "completion_s": none_for_nan(measure(r.times_s, "completion_s")),
            "p99_s": none_for_nan(measure(r.times_s, "p99_s")),
            "max_link_load_ratio": none_for_nan(r.max_load_ratio),
            "missing_share": none_for_nan(r.missing_share),
        }
        for r in sorted(results, key=lambda r: (points.index(r.point), order[r.policy], r.seed))
    ]


def row_at(
    experiment: Experiment, rows: Sequence[dict[str, Any]], policy: str, point: Point
) -> dict[str, Any] | None:
    """The record of an arm at a point."""
    values = experiment.values(policy, point)
    fits = (row for row in rows if row["policy"] == policy and all(row[key] == values[key] for key in values))
    return next(fits, None)


def _record(experiment: Experiment, policy: str, point: Point, mine: Sequence[CaseResult]) -> dict[str, Any]:
    times = [seconds for result in mine for seconds in result.times_s]
    ratios = [r.max_load_ratio for r in mine if not math.isnan(r.max_load_ratio)]
    return {
        "experiment": experiment.name,
        "policy": policy,
        "hosts": mine[0].hosts,
        **experiment.values(policy, point),
        "completion_s": none_for_nan(measure(times, "completion_s")),
        "completion_sd_s": none_for_nan(_spread(mine)),
        "p99_s": none_for_nan(measure(times, "p99_s")),
        "max_link_load_ratio": max(ratios) if ratios else None,
        "paper": None,
        "ours": None,
        "missing_share": none_for_nan(float(np.mean([r.missing_share for r in mine]))),
        "unfinished": sum(r.ended != "done" for r in mine),
        "seeds": len(mine),
        "hops": sum(r.hops for r in mine),
        "wall_s": sum(r.wall_s for r in mine),
        **_of_rounds(mine),
    }


def _spread(mine: Sequence[CaseResult]) -> float:
    """Standard deviation (of a sample) of the seeds' mean completions, seconds; NaN of one seed, or where one has none."""
    means = [measure(r.times_s, "completion_s") for r in mine]
    return float(np.std(means, ddof=1)) if len(means) > 1 else math.nan


def _of_rounds(mine: Sequence[CaseResult]) -> dict[str, Any]:
    """Of runs that compress: mean share that is sent in rounds that end, and the rounds after which the slowest change of rate
    shows in it."""
    if not all(r.rounds for r in mine):
        return {}
    ratios = np.concatenate([r.rounds["ratio"] for r in mine])
    sent = ratios[~np.isnan(ratios)]
    seen = [rounds for r in mine for rounds in reactions(r.rounds["ratio"], r.rounds["rate_bps"])]
    slowest = max(seen, default=math.nan) if not any(map(math.isnan, seen)) else math.nan
    return {"sent_share": float(sent.mean()) if len(sent) else None, "reaction_rounds": none_for_nan(slowest)}


def _against(
    experiment: Experiment, rows: Sequence[dict[str, Any]], claim: Claim, point: Point
) -> float | None:
    """A claim's measure of its arm over that of the other at the same point, less 1."""
    mine, other = (row_at(experiment, rows, policy, point) for policy in (claim.policy, claim.against))
    if mine is None or other is None or mine[claim.measure] is None or not other[claim.measure]:
        return None
    return float(mine[claim.measure] / other[claim.measure] - 1.0)


def claims(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with ours: at its point, or the best of all points; ``best_at``: where that is, empty without axes or ours."""
    found = []
    for claim in experiment.claims:
        points = [point for point in experiment.points() if claim.is_of(point)]
        ours = [
            (value, n)
            for n, point in enumerate(points)
            if (value := _against(experiment, rows, claim, point)) is not None
        ]
        best, place = min(ours, default=(None, None))
        at = "" if place is None else ", ".join(f"{name}={value}" for name, value in points[place])
        found.append({**asdict(claim), "best_at": at, "ours": best})
    return found
