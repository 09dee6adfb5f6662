"""Two or three cores joined in memory: messages, grants, stop rules, FINAL, watermarks, mismatches, failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dblp.errors import ClosedError, DeadlineError, MismatchError, PeerError
from dblp.transport import wire
from dblp.transport.config import TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.final import MAX_TOMBSTONES
from dblp.transport.inbox import EARLY_SLACK_BYTES
from dblp.transport.incoming import Incoming
from dblp.transport.message import message_id
from dblp.transport.policy import Stop
from dblp.transport.rounds import ANY_ORDER_BIT, FORGET_AFTER, FORGET_EVERY, following
from dblp.transport.wire import Type
from tests.transport.cores import CHUNK, LATENCY_S, Cores, numbers, spec_of

Fate = list[tuple[float, bytes]]


def types_of(cores: Cores, target: int) -> list[int]:
    return [header.type for to, header, _ in cores.sent if to == target]


def data_to(cores: Cores, target: int) -> list[wire.Header]:
    return [header for to, header, _ in cores.sent if to == target and header.type == Type.DATA]


# --- whole messages


@pytest.mark.parametrize("chunks", [0, 0.25, 1, 44, 100.5, 700])
def test_a_message_arrives_whole(chunks):
    cores = Cores()
    cores.begin()
    data = numbers(chunks)
    cores.send(0, 1, data)
    sink = cores.receive(1, 0, data)
    cores.run(until=2.0)
    assert (sink.array == data).all() and (sink.times == 1).all()
    assert len(cores.received().missing) == len(cores.delivered().missing) == 0
    assert cores.delivered().chunks_resent == 0, "nothing is repaired where nothing is lost"
    assert cores.cores[0].idle() and cores.cores[1].idle()


@pytest.mark.parametrize("post_at", [0.0, 0.05, 0.5])
def test_a_message_may_begin_before_its_receive_is_posted(post_at):
    cores = Cores()
    cores.begin(0, 0)
    data = numbers(1500)
    cores.send(0, 1, data)
    cores.run(until=1.0 + post_at)
    held = cores.cores[1].receivers[0].inbox.early_bytes
    assert held <= cores.cores[1].config.early_bytes * 1.125 + EARLY_SLACK_BYTES
    cores.begin(0, 1)
    sink = cores.receive(1, 0, data)
    assert cores.cores[1].receivers[0].inbox.early_bytes == 0
    cores.run(until=5.0)
    assert (sink.array == data).all()
    assert cores.delivered().chunks_resent == 0


@pytest.mark.parametrize("loss", [0.05, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_an_exact_message_arrives_whole_through_loss(seed, loss):
    cores = Cores()
    cores.begin()
    rng = np.random.default_rng(seed)

    def lose(header: wire.Header, datagram: bytes, target: int) -> Fate:
        return [] if rng.random() < loss else [(0.0, datagram)]

    cores.tamper = lose
    data = numbers(150.5)
    cores.send(0, 1, data)
    sink = cores.receive(1, 0, data)
    cores.run(until=30.0)
    assert (sink.array == data).all()
    assert len(cores.delivered().missing) == 0


def test_a_windowed_receive_lets_no_more_come_than_was_released():
    cores = Cores()
    cores.begin()
    data = numbers(2000)
    cores.receive(1, 0, data, window=900)
    receiver = cores.cores[1].receivers[0]
    message = receiver.messages[0]
    cores.send(0, 1, data)
    cores.run(until=2.0)
    assert message.got == 900 == max(header.chunk for header in data_to(cores, 1)) + 1
    cores.cores[1].release(0, message, 1000, cores.now)
    cores.cores[1].release(0, message, 950, cores.now)
    cores.run(until=3.0)
    assert message.got == 1000
    cores.cores[1].release(0, message, 5000, cores.now)
    cores.run(until=5.0)
    assert "received" in cores.outcomes


def test_a_lost_grant_is_mended():
    cores = Cores()
    cores.begin()
    data = numbers(2000)
    cores.receive(1, 0, data, window=900)
    message = cores.cores[1].receivers[0].messages[0]
    cores.send(0, 1, data)
    cores.run(until=2.0)
    cores.tamper = lambda header, datagram, target: [] if target == 0 else [(0.0, datagram)]
    cores.cores[1].release(0, message, 2000, cores.now)
    cores.run(until=cores.now + 2 * LATENCY_S)
    cores.tamper = lambda header, datagram, target: [(0.0, datagram)]
    cores.run(until=cores.now + 3.0)
    assert "received" in cores.outcomes


# --- bounded messages


def drop_chunks(*chunks: int, times: int = 1_000_000) -> Any:
    left = dict.fromkeys(chunks, times)

    def tamper(header: wire.Header, datagram: bytes, target: int) -> Fate:
        if header.type == Type.DATA and left.get(header.chunk, 0) > 0:
            left[header.chunk] -= 1
            return []
        return [(0.0, datagram)]

    return tamper


@pytest.mark.parametrize("stop", [Stop.STALL, Stop.EAGER])
def test_a_bounded_message_ends_without_what_was_lost(stop):
    cores = Cores()
    cores.begin()
    cores.tamper = drop_chunks(3, 50, 99)
    data = numbers(100)
    cores.send(0, 1, data, budget=0.1, stop=stop, energy=7.5)
    sink = cores.receive(1, 0, data, budget=0.1, stop=stop)
    cores.run(until=5.0)
    missing = cores.received().missing.tolist()
    assert set(missing) >= {3, 50, 99} and len(missing) <= 10
    assert missing == cores.delivered().missing.tolist() == np.flatnonzero(sink.times == 0).tolist()
    assert cores.received().energy_total == 7.5
    if stop is Stop.STALL:
        assert missing == [3, 50, 99], "nothing that was in flight is thrown away"


def test_beyond_the_budget_a_bounded_message_is_repaired_and_no_more():
    cores = Cores()
    cores.begin()
    cores.tamper = drop_chunks(*range(30), times=1)
    data = numbers(100)
    cores.send(0, 1, data, budget=0.25)
    cores.receive(1, 0, data, budget=0.25)
    cores.run(until=5.0)
    assert 0 < len(cores.received().missing) <= 25
    assert 5 <= cores.delivered().chunks_resent < 30


def test_a_message_without_open_never_completes():
    cores = Cores()
    cores.begin()
    cores.tamper = lambda header, datagram, target: [] if header.type == Type.OPEN else [(0.0, datagram)]
    data = numbers(10)
    cores.send(0, 1, data, budget=0.5)
    sink = cores.receive(1, 0, data, budget=0.5)
    cores.run(until=3.0)
    assert (sink.times == 1).all() and cores.outcomes == {}
    cores.tamper = lambda header, datagram, target: [(0.0, datagram)]
    cores.run(until=6.0)
    assert len(cores.received().missing) == 0


def test_chunks_that_come_after_final_are_void_and_counted():
    cores = Cores()
    cores.begin()
    late: list[bytes] = []

    def hold(header: wire.Header, datagram: bytes, target: int) -> Fate:
        if header.type == Type.DATA and header.chunk == 5:
            late.append(datagram)
            return []
        return [(0.0, datagram)]

    cores.tamper = hold
    data = numbers(100)
    cores.send(0, 1, data, budget=0.1)
    sink = cores.receive(1, 0, data, budget=0.1)
    cores.run(until=3.0)
    assert cores.received().missing.tolist() == [5]
    cores.sent.clear()
    cores.inject(1, late[:1])
    cores.run(until=4.0)
    assert sink.times[5] == 0
    assert cores.cores[1].drops[Drop.LATE] == 1
    assert cores.cores[1].rounds.active[0].counters.chunks_duplicate == 1
    assert types_of(cores, 0).count(Type.FINAL) == 1, "the peer may not have had it"


def test_final_is_repeated_until_it_arrives():
    cores = Cores()
    cores.begin()
    lost: list[bytes] = []

    def tamper(header: wire.Header, datagram: bytes, target: int) -> Fate:
        if header.type == Type.FINAL and len(lost) < 20:
            lost.append(datagram)
            return []
        return [(0.0, datagram)]

    cores.tamper = tamper
    data = numbers(10)
    cores.send(0, 1, data)
    cores.receive(1, 0, data)
    cores.run(until=20.0)
    assert len(lost) == 20 and len(cores.delivered().missing) == 0


# --- tombstones


def play_round(cores: Cores, number: int, **options: Any) -> None:
    cores.begin(number)
    data = numbers(4)
    cores.send(0, 1, data, number=number, name=f"sent {number}", **options)
    cores.receive(1, 0, data, number=number, name=f"received {number}")
    cores.run(until=cores.now + 1.0)
    for core in cores.cores:
        core.end_round(number)


def test_tombstones_go_with_the_watermark():
    cores = Cores()
    for number in range(20):
        play_round(cores, number)
    tombstones = cores.cores[1].receivers[0].tombstones
    assert len(tombstones) <= 2, "those that the last watermark did not cover yet"
    assert all(key >= message_id(0, 18, 0) for key in tombstones)


def test_no_tombstone_goes_before_its_detached_message_is_done():
    """The sender has ended the round, but is still waiting for FINAL."""
    cores = Cores()
    cores.tamper = lambda header, datagram, target: [] if header.type == Type.FINAL else [(0.0, datagram)]
    cores.begin(0)
    data = numbers(4)
    out = cores.send(0, 1, data)
    cores.receive(1, 0, data)
    assert out.detach()
    cores.run(until=1.5)
    for core in cores.cores:
        core.end_round(0)
    cores.begin(1)
    cores.send(0, 1, data, number=1, name="second")
    cores.receive(1, 0, data, number=1)
    cores.run(until=2.5)
    assert message_id(0, 0, 0) in cores.cores[1].receivers[0].tombstones
    cores.tamper = lambda header, datagram, target: [(0.0, datagram)]
    cores.run(until=8.0)
    assert len(cores.delivered().missing) == len(cores.delivered("second").missing) == 0


def bury(receiver, message):
    """A message is over."""
    incoming = Incoming(message, 0.0)
    incoming.have = np.ones(1, np.bool_)
    receiver.finals._close(incoming)


def test_what_followed_a_round_is_forgotten_before_its_ids_come_back():
    receiver = Cores().cores[1].receivers[0]
    old, late, other = (
        message_id(*following(group, number, 0b1111001), 0)
        for group, number in ((0, 0), (0, 5 * FORGET_EVERY), (1, 0))
    )
    for message in (old, late, other, message_id(ANY_ORDER_BIT, 0, 0)):
        bury(receiver, message)
    for watermark in range(FORGET_AFTER):
        receiver.finals.on_watermark(0, watermark)
    assert old in receiver.tombstones
    receiver.finals.on_watermark(0, FORGET_AFTER + 1)
    assert old not in receiver.tombstones, "its ids are free"
    assert {late, other, message_id(ANY_ORDER_BIT, 0, 0)} <= set(receiver.tombstones)


def test_tombstones_of_groups_without_watermarks_are_bounded():
    """Point to point: rounds begin in any order."""
    cores = Cores()
    receiver = cores.cores[1].receivers[0]
    for number in range(MAX_TOMBSTONES + 100):
        bury(receiver, message_id(ANY_ORDER_BIT, number, 0))
    receiver.finals.completed.clear()
    data = numbers(1)
    cores.begin(7)
    cores.send(0, 1, data, number=7)
    cores.receive(1, 0, data, number=7)
    cores.run(until=2.0)
    assert len(receiver.tombstones) <= MAX_TOMBSTONES + 100
    assert message_id(0, 7, 0) in receiver.tombstones
    assert message_id(ANY_ORDER_BIT, 0, 0) not in receiver.tombstones


def test_what_comes_for_a_round_that_is_over_leaves_nothing():
    cores = Cores()
    play_round(cores, 0)
    datagrams = [
        datagram for target, header, datagram in cores.sent if target == 1 and header.type == Type.DATA
    ]
    play_round(cores, 1)
    play_round(cores, 2)
    cores.inject(1, datagrams)
    receiver = cores.cores[1].receivers[0]
    assert receiver.messages == {} and receiver.inbox.early_bytes == 0
    assert cores.cores[1].drops[Drop.LATE] == 4


# --- credit


def test_the_buffer_is_divided_among_those_that_send():
    cores = Cores(4, receive_buffer_bytes=212_992)
    cores.begin()
    data = numbers(500)
    for peer in (1, 2, 3):
        cores.send(peer, 0, data, name=f"sent {peer}")
        cores.receive(0, peer, data, name=f"received {peer}")
    granted = []
    for _ in range(60):
        cores.run(until=cores.now + 1e-3)
        windows = [cores.cores[peer].senders[0].paths[0].window_bytes for peer in (1, 2, 3)]
        flying = [cores.cores[peer].senders[0].paths[0].inflight_cost for peer in (1, 2, 3)]
        granted.append(sum(windows))
        assert sum(flying) <= 212_992
    assert max(granted) <= 212_992


def test_at_the_end_of_a_round_no_peer_is_given_the_others_share():
    """All of them will start the next round at once."""
    cores = Cores(4, receive_buffer_bytes=212_992)
    for number in range(4):
        cores.begin(number)
        for peer in (1, 2, 3):
            data = numbers(60 * peer)
            cores.send(peer, 0, data, number=number, name=f"sent {peer}")
            cores.receive(0, peer, data, number=number, name=f"received {peer}")
        cores.run(
            until=cores.now + 1.0, stop=lambda: all(f"sent {peer}" in cores.outcomes for peer in (1, 2, 3))
        )
        cores.outcomes.clear()
        for core in cores.cores:
            core.end_round(number)
        assert sum(cores.cores[peer].senders[0].paths[0].window_bytes for peer in (1, 2, 3)) <= 212_992


def _long_message(*, whole: bool) -> tuple[float, int, int]:
    """Seconds that a message of many windows takes where only credit holds it back, between hosts or within one (bursts stay
    whole), its feedback, and the datagrams that asked for it."""
    cores = Cores(receive_buffer_bytes=1 << 20, config=TransportConfig(congestion="fixed"))
    for core in cores.cores:
        for sender in core.senders.values():
            sender.paths[0].whole_bursts = whole
    cores.begin()
    data = numbers(6000)
    cores.send(0, 1, data)
    cores.receive(1, 0, data)
    start = cores.now
    cores.run(until=start + 5.0, stop=lambda: "sent" in cores.outcomes)
    asks = sum(bool(header.cls & wire.ASK) for header in data_to(cores, 1))
    return cores.now - start, types_of(cores, 0).count(Type.FEEDBACK), asks


def test_within_a_host_a_peer_tells_in_time_without_being_asked():
    whole_s, told, asks = _long_message(whole=True)
    apart_s, _, asked = _long_message(whole=False)
    windows = 6000 * CHUNK / (0.8 * (1 << 20))
    assert asks == 0 < asked
    assert told < 3.5 * windows, "about a third of the window each"
    assert whole_s < apart_s, (
        "nobody has waited for a timer; a whole burst's charge is less than that of its datagrams"
    )


def test_the_credit_of_one_peer_does_not_delay_the_feedback_to_another():
    """What is due is due by the credit that each peer knows of: of more, that another was told, it knows nothing."""
    cores = Cores(3, receive_buffer_bytes=3 << 20)
    receivers = cores.cores[0].receivers
    before = receivers[1].feedback.every_bytes
    receivers[2].feedback.take(receivers[2].paths[0], 9 << 20, (), 1400, cores.now)
    assert receivers[2].feedback.every_bytes == 3 << 20
    assert receivers[1].feedback.every_bytes == before == int(0.8 * (3 << 20)) // 2 // 3


def test_feedback_fits_its_datagram():
    """Many classes, many grants, long windows: several feedbacks, each within the agreed size."""
    cores = Cores(config=TransportConfig(datagram_bytes=512), datagram_bytes=512)
    cores.begin()
    rng = np.random.default_rng(1)
    cores.tamper = lambda header, datagram, target: [] if rng.random() < 0.3 else [(0.0, datagram)]
    for step in range(40):
        data = numbers(3)
        budget = 0.5 if step % 2 else 0.0
        spec = spec_of(data, budget, chunk=464)
        cores.send(0, 1, data, name=f"sent {step}", spec=spec, step=step)
        cores.receive(1, 0, data, name=f"received {step}", spec=spec, step=step)
    cores.run(until=20.0)
    assert sum(name.startswith("received") for name in cores.outcomes) == 40
    sizes = [len(datagram) for _, header, datagram in cores.sent if header.type == Type.FEEDBACK]
    assert max(sizes) <= 512


# --- disagreement and failure


def test_a_different_call_is_a_mismatch_on_both_sides():
    cores = Cores()
    cores.begin(0, 0, signature=b"all_reduce(sum)")
    cores.begin(0, 1, signature=b"broadcast")
    data = numbers(10)
    cores.send(0, 1, data)
    cores.receive(0, 1, data, "zero")
    cores.receive(1, 0, data, "one")
    cores.run(until=3.0)
    for name in ("zero", "one", "sent"):
        error = cores.outcomes[name]
        assert isinstance(error, MismatchError)
        assert error.ranks == (0, 1)
        assert "rank 0 called all_reduce(sum), but rank 1 called broadcast" in str(error) or (
            "rank 1 called broadcast, but rank 0 called all_reduce(sum)" in str(error)
        )


@pytest.mark.parametrize("late", [False, True])
def test_a_different_size_is_a_mismatch_on_both_sides(late):
    """Whether the receive was posted before or after the data came."""
    cores = Cores()
    cores.begin()
    cores.send(0, 1, numbers(40))
    if late:
        cores.run(until=1.5)
    cores.receive(1, 0, numbers(10))
    cores.receive(0, 1, numbers(10), "zero")
    cores.run(until=5.0)
    for name in ("received", "zero", "sent"):
        assert isinstance(cores.outcomes[name], MismatchError)
    assert f"rank 0 sends {40 * CHUNK} bytes where rank 1 expects {10 * CHUNK}" in str(
        cores.outcomes["received"]
    )
    if late:
        assert cores.cores[1].receivers[0].inbox.early_bytes == 0, "what was held is let go"


def test_a_different_size_is_found_though_open_comes_last():
    cores = Cores()
    cores.begin()
    cores.tamper = lambda header, datagram, target: [(0.02 * (header.type == Type.OPEN), datagram)]
    cores.receive(1, 0, numbers(10))
    cores.send(0, 1, numbers(40))
    cores.run(until=3.0)
    assert isinstance(cores.outcomes["received"], MismatchError)


def test_abort_names_the_same_ranks_everywhere():
    cores = Cores(3)
    cores.begin()
    data = numbers(10)
    for rank in (1, 2):
        cores.receive(rank, 0, data, f"rank {rank}")
    cores.send(0, 1, data)
    cores.cores[1].fail(DeadlineError("rank 0 has not answered for 5 s", [0]), tell=True)
    cores.run(until=3.0)
    assert isinstance(cores.outcomes["rank 1"], DeadlineError)
    told = cores.outcomes["rank 2"]
    assert isinstance(told, DeadlineError) and told.ranks == (0,)
    assert "rank 1 gave up: rank 0 has not answered for 5 s" in str(told)
    with pytest.raises(ClosedError, match="failed before"):
        cores.begin(1, 2)


def test_abort_arrives_through_loss():
    cores = Cores()
    cores.begin()
    rng = np.random.default_rng(3)
    cores.tamper = lambda header, datagram, target: [] if rng.random() < 0.7 else [(0.0, datagram)]
    cores.receive(1, 0, numbers(10))
    cores.cores[0].fail(PeerError("gone", [0]), tell=True)
    cores.run(until=30.0)
    assert isinstance(cores.outcomes["received"], PeerError)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", b"\x91\x01", b"\xff" * 40])
def test_an_abort_of_garbage_is_still_an_abort_of_that_rank(garbage):
    cores = Cores()
    cores.begin()
    cores.receive(1, 0, numbers(10))
    header = wire.Header(
        wire.VERSION, Type.ABORT, 0, 0, 1, 0, 0, cores.cores[0].session, 0, 0, 5, 0, 0, 0, 0, len(garbage)
    )  # fmt: skip
    cores.inject(1, [wire.encode_header(header) + garbage])
    cores.run(until=2.0)
    error = cores.outcomes["received"]
    assert isinstance(error, PeerError) and error.ranks == (0,)


def test_close_while_a_peer_waits_is_an_error_that_names_the_rank():
    cores = Cores(3)
    cores.begin()
    data = numbers(10)
    cores.receive(1, 0, data)
    cores.receive(2, 1, data, "third")
    cores.cores[0].say_goodbye()
    cores.run(until=3.0)
    for name in ("received", "third"):
        error = cores.outcomes[name]
        assert isinstance(error, PeerError) and error.ranks == (0,)
    text = str(cores.outcomes["received"])
    assert "rank 0 closed its group while rank 1 was still in a round with it: round 0 of group" in text
    assert "made fewer calls" in text and "make a new one" in text


def test_close_after_the_last_round_is_no_error():
    cores = Cores()
    play_round(cores, 0)
    cores.cores[0].say_goodbye()
    cores.run(until=cores.now + 2.0)
    assert cores.cores[1].failed is None and cores.cores[1].gone == {0}


def test_an_answer_to_ping_is_a_sign_of_life():
    cores = Cores()
    cores.run(until=5.0)
    before = cores.cores[0].receivers[1].heard_at
    cores.cores[0].ping([1])
    cores.run(until=6.0)
    assert cores.cores[0].receivers[1].heard_at == pytest.approx(5.0 + 2 * LATENCY_S)
    assert before < 2.0


def test_who_leaves_because_a_peer_gave_up_says_so():
    """Rank 2 gives up; rank 1 hears of it and leaves before rank 0 does: rank 0 must not take rank 1 for the cause."""
    cores = Cores(3)
    cores.begin()

    def late(header: wire.Header, datagram: bytes, target: int) -> Fate:
        held = header.type == Type.ABORT and header.rank == 2 and target == 0
        return [(0.5 if held else 0.0, datagram)]

    cores.tamper = late
    data = numbers(3)
    cores.receive(0, 1, data)
    cores.cores[2].fail(DeadlineError("Missing: rank 7", [7]), tell=True)
    cores.run(until=cores.now + 5 * LATENCY_S)
    assert isinstance(cores.cores[1].failed, DeadlineError)
    assert cores.cores[0].failed is None
    cores.cores[1].say_goodbye()
    cores.run(until=cores.now + 5 * LATENCY_S)
    error = cores.outcomes["received"]
    assert isinstance(error, DeadlineError) and list(error.ranks) == [7]
    assert "rank 1 gave up: rank 2 gave up: Missing: rank 7" in str(error)
