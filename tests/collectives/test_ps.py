"""Parameter servers: who serves, who contributes, and how many push at once."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from dblp.collectives.algorithms import algorithm_of, choose
from dblp.collectives.algorithms.incast import MEMORY, OPENING_ROUNDS, Incast, Turns
from dblp.collectives.algorithms.options import format_algorithm, parse_algorithm
from dblp.collectives.group import Group
from dblp.collectives.reduction import DTYPES
from dblp.errors import ConfigError, MismatchError, PeerError, UnsupportedError
from dblp.sim.loop import run as run_virtual
from dblp.sim.port import HostSpec, Link, Network
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.policy import Bounded, Consistency, Exact, Fill, Policy
from tests.collectives.worlds import run_memory, total, values

ALGORITHMS = [
    ("ps", []),
    ("ps(servers=2)", []),
    ("ps(servers=0+1+2)", []),
    ("ps(serve_only)", [0]),
    ("ps(servers=2+0,serve_only)", [0, 2]),
    ("ps(serve_only,whole)", [0]),
]


@pytest.mark.parametrize(("algorithm", "idle"), ALGORITHMS)
@pytest.mark.parametrize("world_size", [3, 6])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_servers_serve_and_all_who_train_contribute(run, algorithm, idle, world_size, op):
    counts = [0, 1, 300, 3000]
    workers = [rank for rank in range(world_size) if rank not in idle]

    async def member(group):
        arrays = [values(group.rank, count, "float32") for count in counts]
        await asyncio.gather(*(group.all_reduce(array, op, algorithm=algorithm) for array in arrays))
        return arrays

    for arrays in run(member, world_size, seed=world_size):
        for array, count in zip(arrays, counts, strict=True):
            if not count:
                continue
            parts = [values(rank, count, "float32") for rank in workers]
            wanted = np.max(parts, axis=0) if op == "max" else total(parts)
            if op == "avg":
                wanted = wanted / np.float32(len(workers))
            assert array.tobytes() == wanted.tobytes()


def test_the_set_up_of_three_workers_and_a_server_loses_within_both_bounds():
    """DBLP's star: push and pull each lose 20 % of their chunks; each worker fills zeros of its own."""
    policy = Policy(budget=0.36, gather_budget=0.2, consistency=Consistency.RELAXED)

    async def member(group):
        array = values(group.rank, 40_000, "float32") + 5
        report = await group.all_reduce(array, policy=policy, algorithm="ps(serve_only)")
        return array, report

    results = run_memory(member, 4, chunk_bytes=512, loss=1.0)
    missing = [report.missing_share for _, report in results]
    assert all(0.1 < share <= 0.2 + 1e-9 for share in missing)
    assert results[0][1].bounded_chunks == 3 * results[1][1].bounded_chunks
    assert 0 < (results[0][0] == 0).mean() < 0.03, "what all three pushes miss: a fifth of a fifth of a fifth"
    assert len({array.tobytes() for array, _ in results[1:]}) == 3
    for array, _ in results[1:]:
        assert ((array == results[0][0]) | (array == 0)).all()


# options


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ring", "ring", {}),
        ("hierarchical( columns = 4 )", "hierarchical", {"columns": 4}),
        ("ps(serve_only, servers=0+3)", "ps", {"serve_only": True, "servers": (0, 3)}),
        ("ps()", "ps", {}),
    ],
)
def test_options_are_read_and_written_in_one_form(text, name, options):
    assert parse_algorithm(text) == (name, options)
    written = format_algorithm(name, options)
    assert parse_algorithm(written) == (name, options) and " " not in written


BAD = [
    ("ps(server=1)", ConfigError, "no option 'server'; those of ps are: servers, serve_only"),
    ("ring(columns=2)", ConfigError, "those of ring are: none"),
    ("ps(servers=a)", ConfigError, "servers needs a number"),
    ("ps(serve_only=1)", ConfigError, "no value if it is a flag"),
    ("ps(servers=0+0)", ConfigError, "different ranks in 0..3"),
    ("ps(servers=4)", ConfigError, "different ranks in 0..3"),
    ("ps(servers=0+1+2+3,serve_only)", ConfigError, "no rank of the 4 is left"),
    ("hierarchical(columns=3)", ConfigError, "a grid of 1, 2, 4 columns"),
    ("ps(servers=0", ConfigError, "option=value"),
    ("tree", ConfigError, "'halving_doubling', 'hierarchical', 'ps'"),
]


@pytest.mark.parametrize(("text", "kind", "says"), BAD)
def test_what_does_not_fit_is_refused(text, kind, says):
    with pytest.raises(kind, match=says):
        choose(text, 1000, 4, DTYPES["float32"], Exact())


def test_what_flows_cannot_do_under_a_bound_names_the_remedy():
    policy = Policy(budget=0.1, fill=Fill.RESCALE)
    with pytest.raises(UnsupportedError, match=r"fill='rescale'.*use 'direct'"):
        choose("ring", 1000, 4, DTYPES["float32"], policy)


def test_the_policy_names_an_algorithm_and_the_call_another():
    policy = Policy(budget=0.1, algorithm="ps(serve_only,servers=1)")
    kind = DTYPES["float32"]
    assert choose("auto", 1000, 4, kind, policy) == ("ps(serve_only,servers=1)", "the policy's choice")
    assert choose("ring", 1000, 4, kind, policy) == ("ring", "the caller's choice")
    bound = algorithm_of("ps(serve_only,servers=1)")
    assert isinstance(bound, functools.partial) and bound.keywords == {"serve_only": True, "servers": (1,)}


@pytest.mark.parametrize(
    ("nbytes", "world_size", "dtype", "chosen", "policy", "wanted", "says"),
    [
        (1000, 64, "float32", "auto", Exact(), "flat", "16 KiB"),
        (1 << 20, 2, "float16", "auto", Exact(), "flat", "at most 1 MiB"),
        ((1 << 20) + 4, 2, "float32", "auto", Exact(), "direct", "above 1 MiB"),
        (1 << 15, 4, "float32", "auto", Exact(), "flat", "at most 32 KiB"),
        ((1 << 15) + 4, 4, "float32", "auto", Exact(), "direct", "above 32 KiB"),
        (1 << 10, 1, "float32", "auto", Exact(), "flat", "at most"),
        (1 << 17, 8, "float32", "auto", Exact(), "direct", "above"),
        (1 << 22, 4, "float32", "auto", Exact(), "ring", "1 MiB or more"),
        (1 << 22, 4, "float16", "auto", Exact(), "direct", "above"),
        (1 << 22, 64, "float32", "auto", Exact(), "halving_doubling", "few steps"),
        (1 << 17, 48, "float32", "auto", Exact(), "halving_doubling", "few steps"),
        (1 << 22, 48, "float32", "auto", Exact(), "ring", "no power of two"),
        (1 << 22, 32, "float32", "auto", Bounded(0.1), "direct", "one hop"),
        (1 << 22, 36, "float32", "auto", Bounded(0.1), "hierarchical", "two hops"),
        (1 << 22, 37, "float32", "auto", Bounded(0.1), "halving_doubling", "no divisors"),
        (1 << 22, 36, "float32", "auto", Policy(budget=0.1, fill=Fill.RESCALE), "direct", "only a direct"),
        (1 << 22, 36, "float32", "ring", Bounded(0.1), "ring", "caller"),
    ],
)
def test_auto_goes_by_size_ranks_and_policy(nbytes, world_size, dtype, chosen, policy, wanted, says):
    name, reason = choose(chosen, nbytes, world_size, DTYPES[dtype], policy)
    assert name == wanted and says in reason


def test_ranks_with_other_options_find_out():
    async def member(group):
        with pytest.raises((MismatchError, PeerError), match="by ps with options of its own"):
            await group.all_reduce(np.zeros(3000, np.float32), algorithm=f"ps(servers={group.rank})")

    run_memory(member, 2)


# incast


def test_the_limit_halves_on_loss_and_grows_when_clean():
    incast = Incast(8)
    for _ in range(OPENING_ROUNDS):
        incast.on_round(1000, 900, 9.0)
        assert incast.limit == 8, "windows open in the first rounds: they tell nothing"
    limits = []
    for resent in (100, 100, 0, 0, 0, 0, 0, 0):
        incast.on_round(1000, resent, 1.0)
        limits.append(incast.limit)
    assert limits == [4, 2, 3, 4, 5, 6, 7, 8]
    incast.on_round(0, 0, 1.0)
    assert incast.limit == 8, "a round without chunks tells nothing"


def test_a_limit_that_is_slower_is_left_until_it_is_forgotten():
    incast = Incast(8)
    for _ in range(OPENING_ROUNDS):
        incast.on_round(1000, 0, 0.1)
    incast.on_round(1000, 500, 1.0)
    incast.on_round(1000, 0, 1.2)
    tried = []
    for _ in range(MEMORY + 2):
        incast.on_round(1000, 500, 1.0)
        tried.append(incast.limit)
    assert tried[0] == 8 and set(tried[: MEMORY - 2]) == {8} and 4 in tried


def test_turns_let_the_next_one_in_as_messages_end():
    turns = Turns(2)
    order: list[int] = []
    windows = [turns.window() for _ in range(4)]
    assert windows == [0, 0, 1, 1]
    for peer in (2, 3):
        turns.wait(functools.partial(order.append, peer))
    turns.next()
    assert order == [2]
    turns.next()
    turns.next()
    assert order == [2, 3] and turns.window() == 0


class _Fixed(Incast):
    """A limit that stays."""

    def on_round(self, sent: int, resent: int, seconds: float) -> None:
        assert sent and seconds > 0


def incast_rounds(incast, rounds, *, gbit=10, queue="128KB", count=1 << 18):
    """8 workers push ``count`` elements to a server behind a shallow queue; the last rounds' times (s) and repeated chunks."""

    async def main():
        loop = asyncio.get_running_loop()
        host = HostSpec(egress_bps=gbit * 1e9, ingress=f"rate({gbit}gbit,queue={queue})")
        network = Network(loop, 1, link=Link(latency_s=25e-6), host=host)
        ports = [network.port(f"h{rank}") for rank in range(9)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig(early_bytes=65_536)
        connects = [
            Endpoint.connect(port, rank=rank, world_size=9, config=config, session=1, peers=peers)
            for rank, port in enumerate(ports)
        ]
        groups = [Group(endpoint) for endpoint in await asyncio.gather(*connects)]
        groups[0]._incast = incast
        seen = []
        for _ in range(rounds):
            arrays = [np.ones(count, np.float32) for _ in groups]
            reports = await asyncio.gather(
                *(g.all_reduce(a, algorithm="ps(serve_only)") for g, a in zip(groups, arrays, strict=True))
            )
            assert all((array == 8.0).all() for array in arrays)
            seen.append((max(r.duration_s for r in reports), sum(r.chunks_resent for r in reports)))
        return [sum(column) / 3 for column in zip(*seen[-3:], strict=True)]

    return run_virtual(main())


def test_eight_to_one_through_a_small_buffer_is_quicker_when_few_may_send():
    """The rule finds fewer senders: a seventh less time than all at once, less than half of the retransmissions."""
    fixed_time, fixed_resent = incast_rounds(_Fixed(8), 4)
    found = Incast(8)
    time, resent = incast_rounds(found, 8)
    assert found.limit < 8
    assert time < 0.9 * fixed_time and resent < 0.5 * fixed_resent


def test_where_fewer_senders_only_take_longer_all_stay():
    """At 1 Gb/s the queue drains between the senders' bursts: pushes and pulls of all overlap best."""
    found = Incast(8)
    found_time, _ = incast_rounds(found, 7, gbit=1, queue="256KB", count=1 << 16)
    few_time, _ = incast_rounds(_Fixed(1), 4, gbit=1, queue="256KB", count=1 << 16)
    assert found.limit == 8 and found_time < 0.9 * few_time


def test_whole_results_leave_when_the_last_push_has_ended():
    """Over links that take 8 ms for the array each way, pushes and pulls overlap, unless the server waits for the whole."""

    async def main(algorithm):
        network = Network(asyncio.get_running_loop(), 1, host=HostSpec(egress_bps=1e9))
        ports = [network.port(f"h{rank}") for rank in range(2)]
        peers = [list(port.addresses) for port in ports]
        config = TransportConfig()
        connects = [
            Endpoint.connect(port, rank=rank, world_size=2, config=config, session=1, peers=peers)
            for rank, port in enumerate(ports)
        ]
        groups = [Group(endpoint) for endpoint in await asyncio.gather(*connects)]
        for _ in range(4):
            arrays = [np.ones(1 << 18, np.float32) for _ in groups]
            tasks = [g.all_reduce(a, algorithm=algorithm) for g, a in zip(groups, arrays, strict=True)]
            reports = await asyncio.gather(*tasks)
        assert all((array == 2.0).all() for array in arrays)
        return max(report.duration_s for report in reports)

    pipelined, whole = (run_virtual(main(algorithm)) for algorithm in ("ps", "ps(whole)"))
    assert pipelined < 0.75 * whole
    assert whole > 2 * 8 * (1 << 20) / 1e9


def test_bounded_pushes_take_turns_too(run):
    async def member(group):
        array = values(group.rank, 20_000, "float32")
        group._incast.limit = 1
        report = await group.all_reduce(array, policy=Bounded(0.1), algorithm="ps")
        return array.tobytes(), report.missing_share

    results = run(member, 6)
    wanted = total(values(rank, 20_000, "float32") for rank in range(6)).tobytes()
    assert {bits for bits, _ in results} == {wanted}
