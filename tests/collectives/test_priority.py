"""Priority: values and classes of chunks as functions, and rounds whose chunks have classes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dblp.collectives.group import Group
from dblp.collectives.priority import (
    SHARES,
    STARVED_ROUNDS,
    Priority,
    Tagger,
    chunk_depths,
    chunk_energies,
    class_sizes,
    classes_by_value,
    layer_weights,
)
from dblp.collectives.reduction import DTYPES, narrow_bfloat16, widen_bfloat16
from dblp.sim.loop import run as run_virtual
from dblp.transport.message import most_critical
from dblp.transport.policy import Bounded, Consistency, Policy, Tags
from tests.collectives.fake import FakeNet, Outgoing
from tests.collectives.test_bounded import arrived, contributions
from tests.collectives.worlds import run_network

SHARE = st.sampled_from([0.0, 0.01, 0.05, 0.1])
quick = settings(deadline=None, max_examples=50)


class Halves:
    """Two layers: the first half of the elements belongs to the last layer, as in DDP's buckets."""

    layer_count = 2

    def __init__(self, elements: int) -> None:
        self._half = elements // 2

    def layer_of(self, elements: np.ndarray) -> np.ndarray:
        return (elements < self._half).astype(np.int32)


# --- classes


@quick
@given(st.integers(0, 5000), SHARE, st.integers(0, 5000))
def test_sizes_of_classes(chunks, critical_share, starved):
    starved = min(starved, chunks)
    sizes = class_sizes(chunks, critical_share, starved)
    assert sum(sizes) == chunks and min(sizes) >= 0
    assert sizes[0] <= most_critical(chunks)
    assert sizes[0] + sizes[1] >= starved, "who starves is lost last, at worst"
    if chunks and critical_share:
        assert sizes[0] >= max(1, int(critical_share * chunks))
    if not starved:
        rest = chunks - sizes[0]
        assert sizes[1:] == pytest.approx([share * rest for share in SHARES], abs=1.01)


@quick
@given(arrays(np.float64, st.integers(0, 300), elements=st.floats(0.0, 1e3)), SHARE, st.data())
def test_classes_follow_values(values, critical_share, data):
    starved = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), bool)
    classes = classes_by_value(values, critical_share)
    sizes = class_sizes(len(values), critical_share)
    assert np.bincount(classes, minlength=4).tolist() == list(sizes)
    for cls in range(3):
        lower, higher = values[classes <= cls], values[classes > cls]
        assert not len(lower) or not len(higher) or lower.min() >= higher.max()
    promoted = classes_by_value(values, critical_share, starved)
    assert (promoted[starved] <= 1).all()
    if starved.sum() <= most_critical(len(values)):
        assert (promoted[starved] == 0).all()
    assert (classes == classes_by_value(values, critical_share, np.zeros(len(values), bool))).all()


def test_equal_values_keep_their_order_and_nan_is_worth_most():
    assert classes_by_value(np.ones(10), 0.1).tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    values = np.arange(10.0)
    values[3] = np.nan
    assert np.flatnonzero(classes_by_value(values, 0.1) == 0).tolist() == [3]


# --- values


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@quick
@given(st.integers(0, 700), st.integers(1, 64), st.integers(0, 99))
def test_energies_of_chunks(name, size, per_chunk, seed):
    wide = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    values = narrow_bfloat16(wide) if name == "bfloat16" else wide.astype(name)
    exact = widen_bfloat16(values) if name == "bfloat16" else values
    energies = chunk_energies(values, DTYPES[name], per_chunk)
    cuts = range(per_chunk, size, per_chunk)
    wanted = [float((part.astype(np.float64) ** 2).sum()) for part in np.split(exact, cuts)] if size else []
    assert energies.dtype == np.float64 and energies.tolist() == pytest.approx(wanted, rel=1e-5)


def test_energies_beyond_float32_and_without_a_number():
    values = np.array([1e30, 1e30, 1.0, np.nan, 2.0], np.float32)
    energies = chunk_energies(values, DTYPES["float32"], 2)
    assert energies[0] == pytest.approx(2e60) and np.isnan(energies[1]) and energies[2] == 4.0


def test_a_long_gradient_is_weighed_in_slabs():
    values = np.random.default_rng(0).normal(size=9000 * 4 + 3).astype(np.float16)
    wanted = (np.append(values, [0]).astype(np.float64) ** 2).reshape(-1, 4).sum(axis=1)
    assert np.allclose(chunk_energies(values, DTYPES["float16"], 4), wanted, rtol=1e-5)


def test_depths_are_those_of_the_deepest_end_and_weights_those_of_what_layers_bear():
    assert chunk_depths(Halves(100), 100, 20).tolist() == [1, 1, 1, 0, 0], "the third holds some of both"
    assert chunk_depths(None, 100, 20).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert chunk_depths(None, 5, 20).tolist() == [0]
    weights = layer_weights(np.array([0.0, 0.5, 1.0]))
    assert weights[0] == pytest.approx(1) and weights[2] == pytest.approx(2.75)
    assert weights[1] == pytest.approx(0.011 / 0.0075), "what layers bear falls evenly"


def tagger(tags, *, layers=None, seed=(0,), critical_share=0.1):
    """Of 100 chunks of 16 elements; chunk i has (i % 10) in each."""
    buffer = np.repeat(np.arange(100) % 10, 16).astype(np.float32)
    policy = Policy(budget=0.1, tags=tags, critical_share=critical_share)
    return Tagger(buffer, DTYPES["float32"], 16, policy, Priority(layers), seed)


def test_tags_by_chance_have_the_same_shares_and_the_seed_decides():
    first, again, other = (
        tagger(Tags.RANDOM, seed=seed).classes(0, 100) for seed in [(1, 2), (1, 2), (1, 3)]
    )
    assert (first == again).all() and (first != other).any()
    assert np.bincount(first).tolist() == list(class_sizes(100, 0.1))


def test_tags_by_magnitude_and_by_layer_and_by_both():
    by = {tags: tagger(tags, layers=Halves(1600)) for tags in (Tags.MAGNITUDE, Tags.LAYER, Tags.BOTH)}
    index = np.arange(100)
    magnitude, layer, both = (each.classes(0, 100) for each in by.values())
    assert (index[magnitude == 0] % 10 == 9).all()
    assert (index[layer <= 1] < 50).all(), "the back layers, which come first in a bucket, bear less loss"
    assert set(index[both == 0].tolist()) == {*range(9, 50, 10), *range(8, 50, 10)}
    assert (both[index % 10 == 0] == 3).all()
    assert by[Tags.BOTH].energy(0, 10) == 16 * 285


def test_classes_are_ranked_within_each_message():
    by_magnitude = tagger(Tags.MAGNITUDE)
    classes = by_magnitude.classes(0, 5)
    assert classes.tolist() == classes_by_value(np.arange(5.0), 0.1).tolist()
    assert by_magnitude.classes(0, 5) is classes


# --- what is remembered


def test_a_chunk_that_is_missing_three_times_running_starves_until_it_arrives():
    priority = Priority()
    for missing in ([1, 2], [1, 2, 3], [1, 3], []):
        assert np.flatnonzero(priority.begin(5)).tolist() == ([1] if not missing else [])
        priority.missed(np.array(missing, np.uint32))
    assert not priority.begin(5).any(), "what starved has arrived"


def test_it_starves_for_as_long_as_it_takes():
    priority = Priority()
    for _ in range(300):
        starved = priority.begin(2)
        priority.missed(np.array([1], np.uint32))
    assert starved.tolist() == [False, True]
    assert not priority.begin(3).any(), "another number of chunks: counts start anew"


# --- rounds


class DroppingNet(FakeNet):
    """Loses as much as it may, of the highest classes first."""

    def _open(self, out: Outgoing) -> None:
        out.opened = True
        order = np.arange(out.spec.chunks)
        if out.classes is not None:
            order = np.argsort(-out.classes.astype(int), kind="stable")
            order = order[out.classes[order] > 0]
        out.void = set(order[: int(out.spec.may_miss * self.loss)].tolist())
        out.pending = [index for index in out.pending if index not in out.void]


def rounds(policy, count, *, world_size=2, number=1, algorithm="direct", net=FakeNet, loss=1.0, parts=None):
    """So many rounds of the same contributions: (arrays, reports) of each."""
    parts = contributions(world_size, count, 4) if parts is None else parts

    async def main():
        world = net(world_size, seed=3, loss=loss, chunk_bytes=512)
        priorities = [Priority() for _ in range(world_size)]
        told = []

        async def member(group):
            array = parts[group.rank].copy()
            report = await group.all_reduce(
                array, policy=policy, algorithm=algorithm, priority=priorities[group.rank]
            )
            return array, report

        groups = [Group(endpoint) for endpoint in world.endpoints]
        for _ in range(number):
            results = await asyncio.gather(*map(member, groups))
            told.append(([array for array, _ in results], [report for _, report in results]))
        return told

    return run_virtual(main())


def policy_of(budget, tags, consistency=Consistency.AGREED, critical_share=0.1):
    return Policy(budget=budget, tags=tags, critical_share=critical_share, consistency=consistency)


@pytest.mark.parametrize("tags", [Tags.RANDOM, Tags.LAYER, Tags.MAGNITUDE, Tags.BOTH])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_result_of_a_tagged_round_is_the_sum_of_what_arrived(tags, world_size):
    count = 7_013 * world_size
    policy = policy_of(0.3, tags, Consistency.EXACT)
    [(results, reports)] = rounds(policy, count, world_size=world_size)
    wanted = arrived(contributions(world_size, count, 4), reports, 0.3)
    for array in results:
        assert array.tobytes() == wanted.tobytes()
    assert all(0.2 < report.missing_share <= 0.3 for report in reports)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "halving_doubling", "hierarchical", "ps"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_tags_in_all_algorithms(algorithm, world_size):
    """Equal on all ranks, nothing added twice, within the bound; without loss the bits of an untagged round."""
    count = 20_011
    policy = policy_of(0.3, Tags.MAGNITUDE)
    [(results, reports)] = rounds(policy, count, world_size=world_size, algorithm=algorithm)
    whole = np.sum(contributions(world_size, count, 4), axis=0)
    assert len({array.tobytes() for array in results}) == 1
    assert (results[0] <= whole).all() and (results[0] < whole).any()
    assert all(report.missing_share <= 0.3 for report in reports)
    [(clean, _)] = rounds(policy, count, world_size=world_size, algorithm=algorithm, loss=0.0)
    plain = Bounded(0.3, carry=None)
    [(untagged, _)] = rounds(plain, count, world_size=world_size, algorithm=algorithm, loss=0.0)
    assert {array.tobytes() for array in clean} == {array.tobytes() for array in untagged}


@pytest.mark.parametrize("tags", [Tags.RANDOM, Tags.MAGNITUDE])
def test_a_tagged_reduce_scatter(tags):
    """Each rank's part is the sum of what arrived; of what a network with priorities lost, nothing was critical."""
    parts = contributions(3, 3 * 9000, 4)

    async def main():
        net = DroppingNet(3, loss=1.0, chunk_bytes=512)
        outputs = [np.zeros(9000, np.float32) for _ in range(3)]
        policy = Policy(budget=0.3, tags=tags, critical_share=0.1)
        reports = await asyncio.gather(
            *(
                Group(endpoint).reduce_scatter(output, part, policy=policy)
                for endpoint, output, part in zip(net.endpoints, outputs, parts, strict=True)
            )
        )
        return outputs, reports

    outputs, reports = run_virtual(main())
    for rank, (output, report) in enumerate(zip(outputs, reports, strict=True)):
        wanted = np.zeros(9000, np.float32)
        for peer, part in enumerate(parts):
            own = part[rank * 9000 : (rank + 1) * 9000].copy()
            for chunk in report.missing.get(peer, ()):
                own[chunk * 128 : (chunk + 1) * 128] = 0
            wanted += own
        assert (output == wanted).all() and 0.2 < report.missing_share <= 0.3
        assert (report.energy_lost < 0.95 * report.missing_share) == (tags is Tags.MAGNITUDE)


def test_no_chunk_of_a_reduce_scatter_starves():
    """What is known of each part's chunks lasts from round to round, if the caller keeps it."""
    parts = contributions(3, 3 * 9000, 4)

    async def main(known):
        net = DroppingNet(3, loss=1.0, chunk_bytes=512)
        policy = Policy(budget=0.3, tags=Tags.MAGNITUDE, critical_share=0.1)
        groups = [Group(endpoint) for endpoint in net.endpoints]
        priorities = [[Priority() for _ in range(3)] if known else None for _ in groups]
        told = []
        for _ in range(STARVED_ROUNDS + 1):
            calls = zip(groups, parts, priorities, strict=True)
            reports = await asyncio.gather(
                *(
                    group.reduce_scatter(np.zeros(9000, np.float32), part, policy=policy, priorities=each)
                    for group, part, each in calls
                )
            )
            told.append(
                {
                    (rank, peer): set(report.missing[peer].tolist())
                    for rank, report in enumerate(reports)
                    for peer in report.missing
                }
            )
        return told

    for known in (True, False):
        told = run_virtual(main(known))
        assert told[0] == told[1] == told[2] and len(told[0]) == 6
        assert (told[0] == told[3]) != known, "those that starved have come"
        if known:
            assert all(len(told[3][pair] & told[0][pair]) < len(told[0][pair]) for pair in told[0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_and_averages(dtype):
    parts = contributions(3, 20_000, 4, dtype)
    [(results, reports)] = rounds(
        policy_of(0.3, Tags.MAGNITUDE, Consistency.EXACT), 20_000, world_size=3, parts=parts
    )
    assert (results[2] == arrived(parts, reports, 0.3)).all()


def test_what_a_network_with_priorities_loses_is_what_matters_least():
    rng = np.random.default_rng(1)
    scales = np.repeat(rng.lognormal(0.0, 1.0, (2, 400)), 100, axis=1)
    parts = list((rng.standard_normal((2, 40_000)) * scales).astype(np.float32))
    lost = {}
    for tags in (Tags.RANDOM, Tags.MAGNITUDE):
        [(_, reports)] = rounds(policy_of(0.2, tags, Consistency.EXACT), 40_000, net=DroppingNet, parts=parts)
        lost[tags] = [report.energy_lost for report in reports]
        assert all(report.missing_share > 0.15 for report in reports)
    assert max(lost[Tags.MAGNITUDE]) < 0.02 < min(lost[Tags.RANDOM]) and np.mean(lost[Tags.RANDOM]) > 0.1


def test_no_chunk_starves():
    """A network that loses the same classes for ever loses other chunks after a while, and no chunk more than 4 times running."""
    told = rounds(policy_of(0.2, Tags.MAGNITUDE), 30_000, number=12, net=DroppingNet)
    for rank in range(2):
        missing = [set(reports[rank].missing[1 - rank].tolist()) for _, reports in told]
        assert missing[0] == missing[1] == missing[2]
        always = set.intersection(*missing[: STARVED_ROUNDS + 1])
        chunks = len(missing[0]) / 0.2
        assert len(missing[0]) - len(always) >= 0.05 * chunks, "as many as may be critical have come"
        assert not set.intersection(*missing)


def test_a_real_network_that_loses_at_random_never_loses_what_is_critical():
    """A tenth of the chunks holds nearly all of the energy: as little of it is lost as if nothing were."""
    scale = np.repeat(np.random.default_rng(0).random(200) < 0.1, 352) * 1000 + 1

    async def member(group):
        array = (contributions(3, 200 * 352, 4)[group.rank] * scale).astype(np.float32)
        policy = Policy(budget=0.4, tags=Tags.MAGNITUDE, critical_share=0.1)
        report = await group.all_reduce(array, policy=policy, algorithm="direct")
        return array, report

    results = run_network(member, 3, impair="loss(0.2)")
    assert len({array.tobytes() for array, _ in results}) == 1
    assert sum(report.missing_chunks for _, report in results) > 50
    assert sum(report.chunks_resent for _, report in results) > 0
    assert max(report.energy_lost for _, report in results) < 0.3
