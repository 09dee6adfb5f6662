"""C4, every gradient is accounted for: summed over ranks, delivered + carried + discarded == contributed.

Contributions are integers, so every sum is exact in float32 and all comparisons are of bits.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp.collectives.carry import Residual
from dblp.collectives.reduction import narrow_bfloat16, widen_bfloat16
from dblp.errors import ConfigError, DeadlineError, MismatchError, PeerError
from dblp.transport.policy import Carry, CarryBound, Consistency, Policy, Short, Stop
from tests.collectives.worlds import run_memory, run_network, total

ALGORITHMS = [
    "direct", "ring", "halving_doubling", "hierarchical", "ps", "ps(serve_only)", "ps(servers=0+1)",
]  # fmt: skip
BOUNDS = [
    Carry(),
    Carry(bound=CarryBound.NORM, limit=0.2),
    Carry(bound=CarryBound.DECAY),
    Carry(bound=CarryBound.AGE),
    Carry(bound=CarryBound.AGE, limit=2),
    Carry(bound=CarryBound.NONE),
    None,
]


@pytest.mark.parametrize("policy", [Policy(), Policy(budget=0.1, carry=Carry())])
def test_a_residual_on_some_ranks_only_is_a_mismatch(policy):
    """Else what the others lose would be in nobody's account."""

    async def member(group):
        residual = Residual(1000) if group.rank else None
        with pytest.raises((MismatchError, PeerError)) as caught:
            await group.all_reduce(np.ones(1000, np.float32), "sum", policy=policy, carry=residual)
        return str(caught.value)

    for text in run_memory(member, 3):
        assert "residual=given" in text


class Books:
    """One rank's accounts over the rounds of a run, in float64."""

    def __init__(self, rank, count, dtype="float32", least=-8):
        self.rank, self.count, self.dtype, self.least = rank, count, dtype, least
        self.contributed = np.zeros(count)
        self.delivered = np.zeros(count)
        self.discarded = np.zeros(count)
        self.reports = []
        self.bits = []
        self.results = []
        wide = "float64" if dtype == "float64" else "float32"
        self.residual = Residual(count, wide, on_discard=self.discard)

    def discard(self, values):
        self.discarded += values

    async def round(self, group, seed, policy, algorithm, op="sum"):
        """One all-reduce of fresh integers."""
        rng = np.random.default_rng([seed, self.rank])
        gradient = rng.integers(self.least, 9, self.count).astype(np.float32)
        array = narrow_bfloat16(gradient) if self.dtype == "bfloat16" else gradient.astype(self.dtype)
        name = self.dtype if self.dtype == "bfloat16" else None
        report = await group.all_reduce(
            array, op, policy=policy, algorithm=algorithm, carry=self.residual, dtype=name
        )
        if "serve_only" not in algorithm or self.rank != 0:
            self.contributed += gradient
        wide = widen_bfloat16(array) if self.dtype == "bfloat16" else array
        ranks = group.world_size - ("serve_only" in algorithm)
        self.results.append(wide.astype(np.float64) * (ranks if op == "avg" else 1))
        self.delivered += self.results[-1]
        self.reports.append(report)
        self.bits.append(array.tobytes())


def check(books, *, counted=True):
    """The contract, element by element; the reports' accounts say the same in sum."""
    first = books[0]
    for other in books[1:]:
        assert other.bits == first.bits, "C3"
        assert [report.filled_chunks for report in other.reports] == [r.filled_chunks for r in first.reports]
    contributed = total(book.contributed for book in books)
    assert (first.delivered + kept(books) == contributed).all(), "C4"
    if counted:
        for book in books:
            assert sum(report.discarded.total for report in book.reports) == book.discarded.sum()
            last = book.reports[-1].carried
            values = book.residual.values.astype(np.float64)
            assert (last.total, last.elements) == (values.sum(), np.count_nonzero(values))
            assert last.energy == pytest.approx(np.square(values).sum())


def kept(books):
    """Carried and discarded, element by element, over all ranks."""
    return total(book.residual.values.astype(np.float64) + book.discarded for book in books)


def keep_books(
    run,
    world_size,
    policy,
    algorithm,
    *,
    rounds=3,
    count=5000,
    op="sum",
    dtype="float32",
    least=-8,
    **options,
):
    async def member(group):
        book = Books(group.rank, count, dtype, least)
        for number in range(rounds):
            await book.round(group, number, policy, algorithm, op)
        return book

    return run(member, world_size, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=12, deadline=None)
@given(
    world_size=st.integers(2, 6),
    count=st.integers(1, 9000),
    budget=st.sampled_from([0.1, 0.5, 0.9]),
    gather=st.sampled_from([None, 0.0, 0.1]),
    consistency=st.sampled_from([Consistency.AGREED, Consistency.EXACT]),
    carry=st.sampled_from(BOUNDS),
    dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16", "float16"]),
    loss=st.sampled_from([0.0, 0.4, 1.0]),
    stop=st.sampled_from([Stop.STALL, Stop.EAGER]),
    seed=st.integers(0, 1000),
)
def test_nothing_leaves_the_account(
    algorithm, world_size, count, budget, gather, consistency, carry, dtype, loss, stop, seed
):
    """On endpoints in memory that lose a share of each budget."""
    if "+" in algorithm or "serve_only" in algorithm:
        world_size = max(world_size, 3)
    gather = None if consistency is Consistency.EXACT else gather
    policy = Policy(budget=budget, gather_budget=gather, consistency=consistency, carry=carry, stop=stop)
    books = keep_books(
        run_memory,
        world_size,
        policy,
        algorithm,
        count=count,
        dtype=dtype,
        seed=seed,
        loss=loss,
        chunk_bytes=512,
    )
    check(books)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("loss", "stop"), [("loss(0.02),reorder(0.05,1ms)", "stall"), ("loss(0.3)", "eager")]
)
def test_over_a_lossy_network(algorithm, loss, stop):
    """Real endpoints; averages of 4 contributions are exact too."""
    world_size = 5 if "serve_only" in algorithm else 4
    policy = Policy(budget=0.5, stop=Stop(stop), carry=Carry())
    books = keep_books(
        run_network, world_size, policy, algorithm, count=8_000, rounds=2, op="avg", seed=6, impair=loss
    )
    check(books)
    assert sum(report.missing_chunks for book in books for report in book.reports) > 0
    assert any(report.carried.elements for book in books for report in book.reports)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=6, deadline=None)
@given(
    world_size=st.integers(3, 6),
    count=st.integers(1, 9000),
    carry=st.sampled_from(BOUNDS),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    loss=st.sampled_from([0.4, 1.0]),
    stop=st.sampled_from([Stop.STALL, Stop.EAGER]),
    seed=st.integers(0, 1000),
)
def test_relaxed_replicas_lack_what_their_reports_say(
    algorithm, world_size, count, carry, dtype, loss, stop, seed
):
    """Under ``RELAXED`` a rank that misses a result has zeros there, which nobody makes up for: the others have it. So C4 holds
    of the results as they were made, and each rank's are those but for its holes. A report has the number of those that the rank
    missed itself; where results make several hops, zeros of ranks before it come on top. Contributions are above zero, so that
    holes show."""
    policy = Policy(budget=0.5, gather_budget=0.3, consistency=Consistency.RELAXED, carry=carry, stop=stop)
    settings_ = {"count": count, "dtype": dtype, "least": 1, "seed": seed, "loss": loss}
    books = keep_books(run_memory, world_size, policy, algorithm, chunk_bytes=512, **settings_)
    results = np.array([book.results for book in books])
    made = results.max(axis=0)
    assert (total(made) + kept(books) == total(book.contributed for book in books)).all(), "C4"
    assert ((results == made) | (results == 0.0)).all()
    itemsize = np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    for number, whole in enumerate(made):
        reports = [book.reports[number] for book in books]
        for report, row in zip(reports, results[:, number], strict=True):
            zeros = np.count_nonzero(row != whole)
            missed = [report] if algorithm.startswith(("direct", "ps")) else reports
            assert zeros <= sum(one.filled_chunks for one in missed) * 512 // itemsize
            if whole.all():  # else a hole may be where a server got nothing either
                assert zeros > (report.filled_chunks - 1) * 256 // itemsize


def test_relaxed_replicas_drift_and_none_is_made_up_for():
    """What the ranks lack of ``results`` is neither delivered to them nor carried: the account of one rank alone has a gap."""
    policy = Policy(budget=0.5, gather_budget=0.3, consistency=Consistency.RELAXED, carry=Carry())
    books = keep_books(run_memory, 4, policy, "direct", loss=1.0, least=1, chunk_bytes=512)
    contributed = total(book.contributed for book in books)
    for book in books:
        gap = contributed - book.delivered - kept(books)
        assert (gap >= 0.0).all() and gap.any()
        assert all(report.filled_chunks for report in book.reports)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("uneven", [False, True])
def test_reduce_scatter_carries(world_size, uneven):
    """Its one leg; the input is left alone."""
    sizes = [3000 + 500 * rank * uneven for rank in range(world_size)]
    borders = np.cumsum(sizes)[:-1]

    async def member(group):
        residual = Residual(sum(sizes))
        contributed, delivered, lost = np.zeros(sum(sizes)), np.zeros(sizes[group.rank]), 0
        for number in range(3):
            gradient = (
                np.random.default_rng([number, group.rank]).integers(-8, 9, sum(sizes)).astype(np.float32)
            )
            output, before = np.empty(sizes[group.rank], np.float32), gradient.copy()
            source = np.split(gradient, borders) if uneven else gradient
            policy = Policy(budget=0.4, carry=Carry(bound=CarryBound.NONE))
            report = await group.reduce_scatter(output, source, policy=policy, carry=residual)
            assert (gradient == before).all()
            contributed += gradient
            delivered += output
            lost += report.missing_chunks
        return contributed, delivered, residual.values, lost

    results = run_memory(member, world_size, seed=2, loss=1.0, chunk_bytes=512)
    delivered = np.concatenate([delivered for _, delivered, _, _ in results])
    contributed, carried = (total(result[index] for result in results) for index in (0, 2))
    assert (delivered + carried == contributed).all()
    assert carried.any() and all(lost for *_, lost in results)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.1, 0.4])
def test_replicas_step_alike(loss):
    """C3, as training has it: parameters that take the same steps on all ranks are the same after every step; and the gather
    leg's budget holds for the union of what the ranks miss. No rank's gradient has a zero, so a hole in the result shows."""
    policy = Policy(budget=0.4, gather_budget=0.06, carry=Carry())

    async def member(group):
        residual, parameters, hashes, holes = Residual(20_000), np.zeros(20_000, np.float32), [], []
        for number in range(4):
            gradient = np.random.default_rng([number, group.rank]).random(20_000, np.float32) + 1.0
            await group.all_reduce(gradient, "avg", policy=policy, carry=residual)
            parameters -= np.float32(0.1) * gradient
            hashes.append(hashlib.sha256(parameters.tobytes()).hexdigest())
            holes.append(np.count_nonzero(gradient == 0) / gradient.size)
        return hashes, holes

    results = run_network(member, 3, seed=9, impair=f"loss({loss})" if loss else "")
    hashes, holes = results[0]
    assert len(set(hashes)) == 4, "every step moves them"
    assert all(other == hashes for other, _ in results)
    assert max(holes) <= 0.06 and (max(holes) > 0.0) == (loss > 0.0)


def test_without_a_residual_nothing_is_carried():
    policy = Policy(budget=0.5, carry=Carry())

    async def member(group):
        array = np.ones(9000, np.float32)
        report = await group.all_reduce(array, policy=policy)
        assert not report.carries and str(report).endswith("result filled, discarded"), str(report)
        return report.carried.elements, report.discarded.elements

    assert set(run_memory(member, 3, loss=1.0, chunk_bytes=512)) == {(0, 0)}


def test_reports_say_what_became_of_what_is_missing():
    policy = Policy(budget=0.5, carry=Carry(bound=CarryBound.NORM, limit=0.5))
    books = keep_books(run_memory, 3, policy, "direct", count=60_000, loss=1.0, chunk_bytes=512)
    for book in books:
        report = book.reports[-1]
        carried, discarded = report.carried, report.discarded
        assert report.carries and report.filled_chunks and carried.elements and discarded.elements
        words = (
            f"{report.filled_chunks} chunks of the result filled, carried to the next gradient: {carried.elements} elements of "
            f"norm {carried.energy**0.5:.3g}, discarded: {discarded.elements} elements of norm {discarded.energy**0.5:.3g}"
        )
        assert str(report).endswith(words), str(report)
    clean = keep_books(run_memory, 3, policy, "direct", loss=0.0)[0].reports[-1]
    assert str(clean).endswith("(0.00% of energy), carried to the next gradient: nothing, discarded: nothing")


def test_reports_say_that_the_default_bound_discards_a_part_of_each_value():
    policy = Policy(budget=0.5, carry=Carry())
    report = keep_books(run_memory, 3, policy, "direct", count=60_000, loss=1.0, chunk_bytes=512)[0].reports[
        -1
    ]
    assert report.bound == "decay" and report.carried.elements == report.discarded.elements > 0
    assert str(report).endswith(" (half of each value or more)"), str(report)


def test_an_exact_round_delivers_what_is_carried():
    async def member(group):
        book = Books(group.rank, 9000)
        await book.round(group, 0, Policy(budget=0.5, carry=Carry()), "direct")
        lost = book.reports[0].carried.elements
        await book.round(group, 1, Policy(carry=Carry()), "auto")
        return book, lost

    results = run_memory(member, 3, loss=1.0, chunk_bytes=512)
    check([book for book, _ in results])
    assert all(lost for _, lost in results) and all(book.residual.empty for book, _ in results)


def test_a_skipped_step_is_carried():
    """All zeros everywhere; the sums are with those who made them, the rest with its senders."""
    policy = Policy(
        budget=0.02,
        stop=Stop.DEADLINE,
        stop_after_s=0.03,
        short=Short.SKIP,
        carry=Carry(bound=CarryBound.NONE),
    )
    books = keep_books(run_network, 3, policy, "direct", count=60_000, seed=3, impair="loss(0.6)")
    check(books)
    assert any(report.skipped for report in books[0].reports)


def test_velocities_are_contributed_instead_of_gradients():
    """DGC's momentum correction, without masking: what all rounds contribute is the sum of the velocities."""
    rule = Carry(bound=CarryBound.NONE, momentum=0.5)

    async def member(group):
        residual = Residual(9000)
        delivered, contributed, velocity = np.zeros((3, 9000), np.float32)
        for number in range(4):
            gradient = np.random.default_rng([number, group.rank]).integers(-8, 9, 9000).astype(np.float32)
            velocity = np.float32(0.5) * velocity + gradient
            contributed = contributed + velocity
            array = gradient.copy()
            await group.all_reduce(array, policy=Policy(budget=0.5, carry=rule), carry=residual)
            delivered = delivered + array
        return contributed, delivered, residual.values

    results = run_memory(member, 3, loss=1.0, chunk_bytes=512)
    contributed, carried = (total(result[index] for result in results) for index in (0, 2))
    assert (results[0][1] + carried == contributed).all() and carried.any()


def test_a_residual_that_does_not_fit_costs_nothing():
    async def member(group):
        array = np.ones(100, np.float32)
        with pytest.raises(ConfigError, match="99 elements, the gradient 100"):
            group.all_reduce(array, carry=Residual(99))
        with pytest.raises(ConfigError, match="only sums and averages"):
            group.all_reduce(array, "max", carry=Residual(100))
        await group.all_reduce(array, carry=Residual(100))
        return array.tolist()

    assert run_memory(member, 2) == [[2.0] * 100] * 2


def test_a_failed_round_lets_the_residual_go():
    async def member(group):
        residual = Residual(9000)
        task = (
            group.all_reduce(np.ones(9000, np.float32), carry=residual, timeout_s=1.0) if group.rank else None
        )
        if task is not None:
            with pytest.raises(DeadlineError):
                await task
        return residual.busy

    assert run_memory(member, 2) == [False, False]
