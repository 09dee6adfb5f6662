"""Budget and ratio decided together: the model's formulas, the estimates, whole runs in virtual time on networks that change."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from dblp.collectives.budget import Interval, agree
from dblp.collectives.compression.curve import RATIOS, energy_curve
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.group import Group
from dblp.collectives.joint import (
    BUDGETS,
    WINDOW,
    Choice,
    EnergyCaps,
    JointController,
    Path,
    PathEstimate,
    StepModel,
)
from dblp.collectives.phases import Schedule
from dblp.errors import ConfigError, MismatchError
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Bounded, Policy
from tests.collectives.compression.cases import bucket

PARTS = bucket([(300, 200), (300,)])
CAPS = EnergyCaps(low=0.3, high=0.9)
RANKS = 2


# the model


def test_bytes_are_those_of_the_exchange():
    model = StepModel(ranks=4, elements=1000)
    assert model.wire_bytes(1.0) == 2 * 3 / 4 * 4000
    assert model.wire_bytes(0.01) == 3 * 8 * 10


@pytest.mark.parametrize(
    ("choice", "missing"),
    [(Choice(budget=0.2), 0.18 / 0.98), (Choice(ratio=0.1, budget=0.2), 0.2 / 3), (Choice(), 0.0)],
)
def test_what_a_message_may_miss(choice, missing):
    assert StepModel(ranks=4, elements=1000).may_miss(choice) == pytest.approx(missing)


def test_a_step_takes_what_the_formula_says():
    model = StepModel(ranks=2, elements=10**6, compress_s_per_melem=0.004)
    path = Path(rate_bps=1e8, delay_s=0.002)
    assert model.step_s(Choice(), path) == pytest.approx(8 * 4e6 / 1e8 + 0.002)
    assert model.step_s(Choice(ratio=0.01), path) == pytest.approx(0.004 + 8 * 8e4 / 1e8 + 0.002)


def test_a_budget_spares_repairs_and_their_round_trips():
    """1 % lost of 718 chunks in a message: 7 are missing first, 0.07 after one pass. With 2 % allowed none is sent again."""
    model, path = StepModel(ranks=2, elements=250_000), Path(rate_bps=1e9, delay_s=0.01, loss=0.01)
    nbytes, plain = 8 * 1e6 / 1e9, 0.01
    assert model.step_s(Choice(), path) == pytest.approx(nbytes * (1 + 0.01 / 0.99) + 2 * plain)
    assert model.step_s(Choice(budget=0.05), path) == pytest.approx(nbytes + plain)
    worse = Path(rate_bps=1e9, delay_s=0.01, loss=0.1)
    assert model.step_s(Choice(), worse) == pytest.approx(nbytes * (1 + 0.1 / 0.9) + 3 * plain)


def test_energy_is_lost_and_withheld():
    model, path = StepModel(ranks=3, elements=1000), Path(rate_bps=1e9, loss=0.1)
    assert model.energy(Choice(), path, 0.0) == 0.0
    assert model.energy(Choice(budget=0.2), path, 0.0) == pytest.approx(0.1)
    assert model.energy(Choice(ratio=0.1), path, 0.4) == pytest.approx(0.4)
    assert model.energy(Choice(ratio=0.1, budget=0.5), path, 0.4) == pytest.approx(1 - 0.6 * 0.81)
    assert model.energy(Choice(ratio=0.1, budget=0.05), path, 0.4) == pytest.approx(1 - 0.6 * 0.95)


# what is measured


def test_a_curve_is_that_of_the_sorted_squares():
    values = np.zeros(PARTS.size, np.float32)
    values[:60_000] = np.random.default_rng(0).permutation(np.r_[np.full(600, 10.0), np.full(59_400, 1.0)])
    behind = dict(zip(RATIOS, energy_curve(PARTS, values), strict=True))
    total = 600 * 100 + 59_400
    assert behind[1.0] == 0.0
    assert behind[0.01] == pytest.approx(59_400 / total, abs=0.1)
    assert behind[0.1] == pytest.approx(54_000 / total, abs=0.1)
    assert behind[0.001] == pytest.approx(1 - 6_000 / total, abs=0.1)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_curve_of_nothing_says_nothing(value):
    assert energy_curve(PARTS, np.full(PARTS.size, value, np.float32)) == (0.0,) * len(RATIOS)
    assert energy_curve(bucket([(0,)]), np.empty(0, np.float32)) == (0.0,) * len(RATIOS)


def test_a_line_through_sizes_tells_rate_from_delay():
    estimate = PathEstimate()
    assert estimate.path() is None
    for nbytes in (1e5, 4e5, 2e5, 1e6):
        estimate.add(nbytes, 0.003 + 8 * nbytes / 2e8, 100, 3)
    path = estimate.path()
    assert path is not None
    assert path.rate_bps == pytest.approx(2e8) and path.delay_s == pytest.approx(0.003) and path.loss == 0.03
    for _ in range(WINDOW):  # of one size, on a network ten times slower: the delay stays
        estimate.add(1e6, 0.003 + 8e6 / 2e7, 100, 0)
    path = estimate.path()
    assert path is not None
    assert path.rate_bps == pytest.approx(2e7, rel=0.02) and path.delay_s == pytest.approx(0.003, rel=0.5)
    assert path.loss == 0.0


def test_two_strange_iterations_are_another_path_and_one_is_not():
    estimate = PathEstimate()
    for nbytes in (1e5, 4e5, 2e5, 1e6):
        estimate.add(nbytes, 0.003 + 8 * nbytes / 2e8, 100, 0)
    estimate.add(1e6, 0.4, 100, 0)
    assert len(estimate.samples) == 5 and estimate.strange == 1
    estimate.add(1e6, 0.043, 100, 0)
    assert len(estimate.samples) == 6 and estimate.strange == 0
    for _ in range(2):
        estimate.add(1e6, 4.0, 100, 0)
    assert len(estimate.samples) == 2


# whole runs


class _World:
    """Ranks on a simulated network that changes at given steps."""

    def __init__(self, changes, *, steps, caps=CAPS, critical=(), seed=0, scale=None, encode=0.004):
        self.changes = changes  # step -> (rate_bps, loss)
        self.steps, self.caps, self.seed, self.encode = steps, caps, seed, encode
        self.critical = critical  # spans of iterations
        self.scale = scale or (lambda step: 1.0)

    def run(self):
        return run_virtual(self._main())

    async def _main(self):
        loop = asyncio.get_running_loop()
        self.network = Network(loop, self.seed, interrupt_s=2e-4)
        self._set(*self.changes[0])
        ports = [self.network.port(f"h{rank}") for rank in range(RANKS)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(seed=self.seed)
        connects = [
            Endpoint.connect(port, rank=rank, world_size=RANKS, config=config, session=7, peers=peers)
            for rank, port in enumerate(ports)
        ]
        endpoints = await asyncio.gather(*connects)
        results = await asyncio.gather(
            *(self._member(Group(endpoint, timeout_s=60.0)) for endpoint in endpoints)
        )
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))
        return results

    def _set(self, rate_bps, loss):
        for rank in range(RANKS):
            self.network.set_host(f"h{rank}", HostSpec(egress_bps=rate_bps))
            link = Link(latency_s=1e-3, impair=f"loss({loss:g})" if loss else "")
            self.network.set_link(f"h{rank}", f"h{(rank + 1) % RANKS}", link, one_way=True)

    def controller(self):
        return JointController(
            Schedule(iterations=self.critical),
            self.caps,
            interval=Interval(iterations=1),
            check=Interval(iterations=2),
            compress_s_per_melem=self.encode,
        )

    async def _member(self, group):
        controller, compression = self.controller(), Compression(parse_compression("joint"))
        base, seen = Bounded(0.1, carry=Bounded(0.1).carry), []
        for step in range(self.steps):
            if group.rank == 0 and step in self.changes:
                self._set(*self.changes[step])
            array = _gradient(group.rank, step) * np.float32(self.scale(step))
            controller.begin_iteration()
            choice = Choice(ratio=controller.ratio, budget=controller.policy(base).budget)
            report = await compression.all_reduce(
                group,
                array,
                PARTS,
                timeout_s=30.0,
                iteration=step,
                policy=controller.policy(base),
                ratio=controller.ratio,
                weigh=True,
            )
            controller.hear(report)
            seen.append((choice, report, controller.energy_cap, float(array.sum(dtype=np.float64))))
            await agree(group, controller)
        return seen, controller


def _gradient(rank, step):
    """Heavy-tailed, a new one in each step around a common part."""
    rng = np.random.default_rng([5, step])
    common = rng.standard_normal(PARTS.size) * np.exp(1.5 * rng.standard_normal(PARTS.size))
    own = np.random.default_rng([6, rank, step]).standard_normal(PARTS.size)
    return (common + 0.3 * own).astype(np.float32)


def _choices(seen, low, high):
    return [choice for choice, *_ in seen[low:high]]


def test_ranks_decide_alike_and_hold_the_same():
    results = _World({0: (2e7, 0.02)}, steps=12).run()
    (first, _), (second, _) = results
    assert _choices(first, 0, 12) == _choices(second, 0, 12)
    assert [row[3] for row in first] == [row[3] for row in second]
    assert any(choice.ratio < 1 for choice in _choices(first, 0, 12))


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_the_cap_holds(loss):
    """On every rank, in every step: while the network gets ten times slower, and back."""
    world = _World({0: (2e8, loss), 16: (2e7, loss), 32: (2e8, loss)}, steps=44)
    for seen, _ in world.run():
        assert all(row[1].energy_withheld <= row[2] for row in seen)
        assert min(choice.ratio for choice in _choices(seen, 16, 32)) < 0.3


def test_the_caps_follow_the_phases():
    """Critical for twelve steps, then tolerant, then critical: less may be withheld, and less is."""
    critical = [(0, 12), (28, 40)]
    (seen, _), _ = _World({0: (1e7, 0.0)}, steps=40, critical=critical).run()
    ratios = [choice.ratio for choice, *_ in seen]
    assert min(ratios[14:28]) < min(ratios[:12]) and max(ratios[34:]) > max(ratios[22:27])
    late = [row for row in seen if row[2] == CAPS.low]
    # What the tolerant phase has withheld must first be sent: the next check sends more.
    assert sum(row[1].energy_withheld > row[2] for row in late) <= 3


def test_a_slow_network_gets_less_and_a_quick_one_all():
    """Encoding takes 6 ms here: more than sending all at 10 Gb/s, less than a tenth of it at 20 Mb/s."""
    changes = {0: (1e10, 0.0), 12: (2e7, 0.0), 32: (1e10, 0.0)}
    (seen, controller), _ = _World(changes, steps=56, encode=0.1).run()
    assert all(choice.ratio == 1.0 for choice in _choices(seen, 8, 12))
    assert max(choice.ratio for choice in _choices(seen, 20, 32)) <= 0.3
    assert controller.choice.ratio == 1.0


def test_a_network_that_loses_gets_a_budget_where_repairs_cost_more_than_energy():
    """2 ms there and back, and little to send: a pass of repairs costs more than all bytes."""
    (lossless, _), _ = _World({0: (1e9, 0.0)}, steps=16).run()
    (lossy, controller), _ = _World({0: (1e9, 0.03)}, steps=32).run()
    assert all(choice.budget == 0.0 for choice in _choices(lossless, 0, 16))
    assert max(choice.budget for choice in _choices(lossy, 8, 32)) > 0.0
    assert controller.predicted_s is not None and controller.predicted_s > 0.0


def test_a_run_goes_on_from_a_checkpoint():
    """Saved after any step and loaded into a new one, a controller decides as the one that went on."""
    world = _World({0: (2e7, 0.02)}, steps=1)
    first, reports = world.controller(), []
    (seen, _), _ = _World({0: (2e7, 0.02)}, steps=20).run()
    reports = [row[1] for row in seen]
    for step, report in enumerate(reports):
        second = world.controller()
        second.load_state_dict(first.state_dict())
        for controller in (first, second):
            controller.begin_iteration()
            controller.hear(report)
            controller.end_iteration()
            if (vector := controller.vector_to_agree()) is not None:
                controller.decide(vector)
        assert first.choice == second.choice and first.state_dict() == second.state_dict(), step
    assert first.choice != Choice()


def test_what_is_no_state_is_refused_and_changes_nothing():
    controller = _World({}, steps=0).controller()
    state = controller.state_dict()
    for broken in (
        {},
        {**state, "joint": {}},
        {**state, "joint": {**state["joint"], "choice": {"ratio": 0.02, "budget": 0.0}}},
        {**state, "joint": {**state["joint"], "samples": [[1.0]]}},
        {**state, "joint": {**state["joint"], "heard": {**state["joint"]["heard"], "curve": [0.1]}}},
    ):
        with pytest.raises(ConfigError, match="no state of a JointController"):
            controller.load_state_dict(broken)
    assert controller.state_dict() == state


def test_ranks_that_count_otherwise_hear_of_it():
    one, other = (_World({}, steps=0).controller() for _ in range(2))
    for controller, times in ((one, 1), (other, 3)):
        for _ in range(times):
            controller.begin_iteration()
            controller.end_iteration()
    vectors = [controller.vector_to_agree() for controller in (one, other)]
    assert vectors[0] is not None and vectors[1] is not None
    with pytest.raises(MismatchError, match="different iterations"):
        one.decide(np.maximum(*vectors))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EnergyCaps(low=0.0),
        lambda: EnergyCaps(low=0.5, high=0.4),
        lambda: EnergyCaps(low=0.5, high=1.0),
        lambda: JointController(Schedule(), 0.2),  # type: ignore[arg-type]
        lambda: JointController(Schedule(), check=4),  # type: ignore[arg-type]
        lambda: JointController(Schedule(), budgets=(1.5,)),
    ],
)
def test_what_it_refuses(make):
    with pytest.raises(ConfigError):
        make()


def test_its_policy_has_its_budget_alone():
    controller = _World({}, steps=0).controller()
    base = Policy(budget=0.3, gather_budget=0.1)
    assert controller.policy(base) == Policy(budget=0.0)
    assert controller.loosest(base).budget == max(BUDGETS)
    assert math.isclose(controller.ratio, 1.0)
