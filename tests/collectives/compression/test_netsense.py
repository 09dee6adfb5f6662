"""NetSenseML between ranks in virtual time, on networks whose rate changes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.iterations import Iteration
from dblp.collectives.compression.netsense import _SIZE, NetSense, _Control
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.compression.sensing import Sensing
from dblp.collectives.group import Group
from dblp.errors import ConfigError
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from tests.collectives.compression.cases import gradient, job
from tests.collectives.worlds import run_memory

RANKS = 3
PARTS = Bucket([Part("a", (300, 200)), Part("b", (500,))])
LATER = Bucket([Part("c", (150, 100))])
DELAY_S = 2e-3
"""Each way; a round trip is twice as long."""
DENSE_BYTES = 4 / 3 * 4 * (PARTS.size + LATER.size)
"""That a rank moves in an all-reduce of both."""


class Job:
    """Ranks that average buckets over and over, on links whose rate the test sets between iterations."""

    def __init__(self, text="netsense", buckets=(PARTS, LATER), dtype="float32"):
        self.text, self.buckets, self.dtype = text, buckets, dtype
        self.shares: list[float] = []
        self.figures: list[dict[str, float]] = []
        self.given = [np.zeros(parts.size) for parts in buckets]
        self.delivered = [np.zeros(parts.size) for parts in buckets]

    def run(self, rates):
        """One iteration for each rate, in bits per second; the ratios that were sent."""
        run_virtual(self._main(rates))
        return self.shares

    async def _main(self, rates):
        network = Network(asyncio.get_running_loop(), 1, link=Link(latency_s=DELAY_S))
        ports = [network.port(f"h{rank}") for rank in range(RANKS)]
        peers = [list(port.addresses) for port in ports]
        endpoints = await asyncio.gather(
            *(
                Endpoint.connect(
                    port, rank=rank, world_size=RANKS, config=TransportConfig(), session=7, peers=peers
                )
                for rank, port in enumerate(ports)
            )
        )
        groups = [Group(endpoint, timeout_s=60.0) for endpoint in endpoints]
        self.compressions = [Compression(parse_compression(self.text)) for _ in groups]
        for step, rate in enumerate(rates):
            for rank in range(RANKS):
                network.set_host(
                    f"h{rank}", HostSpec(egress_bps=rate, ingress=f"rate({rate:g}bit,queue=1MB)")
                )
            sent = await asyncio.gather(*(self._iterate(groups[rank], rank, step) for rank in range(RANKS)))
            assert len({str(figures) for figures in sent}) == 1, "all ranks know and decide the same"
            self.figures.append(sent[0])
            self.shares.append(sent[0]["ratio"])
        await asyncio.gather(*(endpoint.close(linger_s=1.0) for endpoint in endpoints))

    async def _iterate(self, group, rank, step):
        await asyncio.sleep(1e-3 * rank)  # ranks do not come at once
        compression, averages = self.compressions[rank], []
        for index, parts in enumerate(self.buckets):
            array = np.round(gradient(parts.size, self.dtype, seed=100 * step + rank))
            self.given[index] += array
            averages.append(array)
        reports = [
            compression.all_reduce(group, array, parts, timeout_s=60.0, iteration=step)
            for array, parts in zip(averages, self.buckets, strict=True)
        ]
        await asyncio.gather(*reports)
        for array, total in zip(averages, self.delivered, strict=True):
            total += array
        return compression.figures

    def withheld(self, index):
        memories = [c._memories.of(self.buckets[index].layout) for c in self.compressions]
        return sum(memory.residual for memory in memories)


def test_off_where_everything_fits():
    """10 Gb/s with a round trip of 4 ms hold 5 MB: nothing is ever withheld, the average is the exact one."""
    job_ = Job()
    assert set(job_.run([1e10] * 8)) == {1.0}
    for index in (0, 1):
        np.testing.assert_allclose(job_.delivered[index], job_.given[index], rtol=1e-5, atol=1e-3)
        assert not job_.withheld(index).any()


def test_on_where_it_does_not_and_what_is_in_flight_fits():
    """20 Mb/s hold 10 KB, of 403 KB that an all-reduce moves."""
    job_ = Job()
    shares = job_.run([2e7] * 25)
    assert shares[:2] == [1.0, 1.0] and max(shares[3:]) < 0.1
    fits = 0.9 * 2e7 / 8 * 2 * DELAY_S
    moved = [2 * share * 6 * (PARTS.size + LATER.size) for share in shares[10:]]
    assert 0.3 * fits < np.mean(moved) < 1.3 * fits
    last = job_.figures[-1]
    assert last["delay_s"] == pytest.approx(2 * DELAY_S, rel=0.2)
    assert last["bandwidth_bps"] == pytest.approx(2e7, rel=0.4)


def test_nothing_is_lost_on_the_way():
    """Through changes of the rate, compression on and off, two buckets: what was given was delivered or is withheld."""
    job_ = Job()
    shares = job_.run([1e10] * 4 + [2e7] * 8 + [1e8] * 8 + [1e10] * 8)
    assert min(shares) < 0.1 and 1.0 in shares
    for index in (0, 1):
        lost = job_.given[index] - job_.delivered[index] - job_.withheld(index)
        size = np.abs(job_.given[index]).max()
        assert np.abs(lost).max() <= 1e-5 * size, "but for the rounding of averages over three ranks"


@pytest.mark.parametrize("factor", [0.25, 0.1])
def test_a_fall_of_the_rate_shows_within_five_rounds(factor):
    """From a rate to a part of it, compressed before and after: the fifth round moves what fits by the new one."""
    before, after = 1.2e8, factor * 1.2e8
    shares = Job().run([before] * 25 + [after] * 5)
    assert shares[24] < 1.0
    fits = 0.9 * after / 8 * 2 * DELAY_S
    moved = 2 * shares[-1] * 6 * (PARTS.size + LATER.size)
    assert moved < 1.3 * fits and shares[-1] < 2 * factor * np.mean(shares[15:25])


def test_a_rise_of_the_rate_shows_within_five_rounds():
    shares = Job().run([2e7] * 25 + [2e8] * 12)
    before = np.mean(shares[15:25])
    assert shares[29] > 1.5 * before
    assert shares[36] > 4 * before, "and it goes on rising"


def test_congestion_begins_and_ends():
    """Everything fits at first, then does not, then does again."""
    shares = Job().run([1e10] * 5 + [2e7] * 5 + [1e10] * 25)
    assert shares[4] == 1.0 and shares[9] < 0.1 and shares[-1] == 1.0


def test_where_the_transport_tells_no_delay_a_round_of_one_number_does():
    """Endpoints in memory: every turn takes 0.1 ms of virtual time whatever is sent, so that nothing is ever congested."""

    async def member(group):
        assert group.least_delay_s() == 0.0
        compression = Compression(NetSense())
        for step in range(6):
            array = gradient(LATER.size, "float32", seed=step)
            await compression.all_reduce(group, array, LATER, timeout_s=20.0, iteration=step)
        return compression.figures

    first, second = run_memory(member, 2, chunk_bytes=1024)
    assert first == second and first["delay_s"] > 0.0


def test_one_rank_alone_sends_everything():
    async def member(group):
        compression, array = Compression(NetSense()), gradient(LATER.size, "float32")
        for step in range(4):
            mine = array.copy()
            await compression.all_reduce(group, mine, LATER, timeout_s=20.0, iteration=step)
            np.testing.assert_array_equal(mine, array)
        return compression.figures["ratio"]

    assert run_memory(member, 1) == [1.0]


def test_time_that_may_be_taken_makes_room():
    """100 Mb/s hold 50 KB in a round trip, and 1.25 MB in 100 ms."""
    assert max(Job().run([1e8] * 12)[4:]) < 1.0
    assert set(Job("netsense(allow=100ms)").run([1e8] * 12)) == {1.0}


def _compress(method, share, array, parts=PARTS, dtype="float32"):
    work = job(parts, array, dtype)
    work.notes.update(share=share, whole=False)
    method.begin(work, array)
    work.notes["iteration"] = Iteration(0.0)
    sent = method.compress(work)
    return work, method.own_part(work, sent), sent


def test_the_pipeline_quantises_prunes_and_selects_by_the_share():
    array = gradient(PARTS.size, "float32", spread=1.0)
    array[:60_000] *= 10  # the matrix is larger than the vector, and has the largest elements
    for share, half in [(0.6, False), (0.3, False), (0.2, True), (0.01, True)]:
        work, own, sent = _compress(NetSense(), share, array)
        np.testing.assert_array_equal(own + work.values, array)
        picked = np.flatnonzero(own)
        assert len(picked) == np.ceil(share * PARTS.size)
        assert (own[picked] == own[picked].astype(np.float16)).all() == half
        assert sent.size == 8 + 16 + len(picked) * (6 if half else 8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("quantise", [0.25, 0.1])
def test_entries_are_never_more_bytes_than_everything(ranks, quantise):
    """What fits goes from next to nothing to nearly everything: shares from below ``quantise``, where values get wider, to where
    an all-reduce is as few bytes. There everything is sent."""
    method, array = NetSense(quantise=quantise), gradient(PARTS.size, "float32")
    whole = 2 * (ranks - 1) / ranks * 4 * PARTS.size
    seen = set()
    for part in np.linspace(0.05, 0.999, 25):
        control, sent_share = _Control(np.zeros(_SIZE)), 0.0
        work = job(PARTS, array, "float32", world_size=ranks)
        for _ in range(12):
            moved = whole if not sent_share else _moved(method, sent_share, array, ranks)
            rate = part * whole / method.threshold  # of a delay of a second
            control.sensing = Sensing(np.array([rate, rate, moved, 1.0, 1.0, 1.0]))
            method._set(control, work, PARTS.size, sent_share)
            sent_share = control.share
            assert not sent_share or _moved(method, sent_share, array, ranks) <= whole + (ranks - 1) * 32
            seen.add(sent_share)
    # Between five ranks 0.25 would be beyond the break-even of wide values, and all shares below save bytes by narrow ones.
    assert (0.0 in seen) == ((ranks, quantise) != (5, 0.25)) and min(seen - {0.0}) < quantise
    assert max(seen) > 0.9 / ranks, "and entries are sent up to there"


def _moved(method, share, array, ranks):
    return (ranks - 1) * _compress(method, share, array)[2].nbytes


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_shares_from_quantise_on_are_sent_up_to_the_break_even_and_no_further(ranks):
    """Between four ranks 0.25 is the break-even itself."""
    method = NetSense()
    work = job(PARTS, gradient(PARTS.size, "float32"), "float32", world_size=ranks)
    whole = 2 * (ranks - 1) / ranks * 4 * PARTS.size
    for share in np.linspace(0.25, 4 / (3 * ranks) + 0.1, 30):
        control = _Control(np.zeros(_SIZE))
        control.share = float(share)
        control.sensing = Sensing(np.array([0.0, 0.99 * whole / 0.9, 0.9 * whole, 1.0, 1.0, 1.0]))
        method._set(control, work, PARTS.size, float(share))
        assert control.share < 1 / ranks or (ranks == 5 and control.share < 0.25)


def test_what_is_pruned_is_the_smaller_part_of_each_matrix():
    """A vector is not pruned: where the share would take everything of the larger half of the matrix and more, it takes the
    vector's elements, though they are smaller."""
    array = np.concatenate([np.linspace(10, 20, 60_000), np.full(500, 5.0)]).astype(np.float32)
    _, own, _ = _compress(NetSense(quantise=0.0), 0.499, array)
    kept = np.flatnonzero(own[:60_000])
    assert kept.min() >= 29_000 and np.count_nonzero(own[60_000:]) > 0
    _, own, _ = _compress(NetSense(quantise=0.0, prune=0.0), 0.499, array)
    assert np.count_nonzero(own[60_000:]) == 0


def test_a_state_goes_on_where_it_was():
    async def member(group):
        first = Compression(NetSense())
        for step in range(5):
            array = gradient(LATER.size, "float32", seed=step)
            await first.all_reduce(group, array, LATER, timeout_s=20.0, iteration=step)
        second = Compression(NetSense())
        second.load_state_dict(first.state_dict())
        assert second.figures == first.figures
        for step in range(5, 10):
            array = gradient(LATER.size, "float32", seed=step)
            await second.all_reduce(group, array, LATER, timeout_s=20.0, iteration=step)
        return second.figures

    first, second = run_memory(member, 2, chunk_bytes=1024)
    assert first == second


def test_options():
    assert NetSense().figures({}) == {}
    assert str(parse_compression("netsense(allow=5ms,least=0.01)")).startswith("netsense(threshold=0.9")
    for text in ("netsense(threshold=0)", "netsense(decrease=1)", "netsense(prune=1)", "netsense(least=0)"):
        with pytest.raises(ConfigError):
            parse_compression(text)
