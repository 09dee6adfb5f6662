"""One peer's sender, told literal times: what leaves, credit, grants, the end of a message, watermarks."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.backlog import Backlog
from dblp.transport.burst import BurstBuffer, Train
from dblp.transport.config import TransportConfig
from dblp.transport.flight import Control
from dblp.transport.message import MessageSpec, Sent
from dblp.transport.port import Burst
from dblp.transport.sender import PeerSender
from dblp.transport.wire import Type
from tests.transport.cores import CHUNK, address, numbers, split
from tests.transport.sender_bench import COST, RTT_S, Bench, data_of, warm

# --- what leaves


def test_open_leaves_before_the_chunks_and_the_last_burst_says_that_it_is_the_last():
    bench = Bench()
    bench.send(numbers(100.5))
    headers = bench.leave()
    assert headers[0].type == Type.OPEN
    assert [header.chunk for header in data_of(headers)] == list(range(101))
    assert all(bool(h.cls & wire.LAST) == (h.burst == headers[-1].burst) for h in data_of(headers))
    assert headers[-1].type == Type.DATA


def test_of_a_bounded_message_end_follows_the_last_burst_on_a_clean_path_too():
    """Its receiver waits for either; a burst of loss that begins now may take one of them."""
    bench = Bench()
    bench.send(numbers(100.5), budget=0.1)
    headers = bench.leave()
    assert headers[-1].type == Type.END
    assert headers[-2].cls & wire.LAST
    assert [header.type for header in headers].count(Type.END) == 1


def test_where_datagrams_are_lost_end_follows_the_last_burst():
    bench = Bench()
    bench.path.lost_lately = 3.0
    bench.send(numbers(100.5))
    headers = bench.leave()
    assert headers[-1].type == Type.END
    assert not any(header.cls & wire.LAST for header in headers)


def test_a_last_burst_of_which_only_a_part_came_is_asked_for():
    bench = Bench()
    bench.send(numbers(100.5))
    headers = bench.leave()
    bench.now += RTT_S
    bench.feedback(*[h for h in headers if h.chunk != 99])
    assert [header.type for header in bench.leave()] == [Type.END]


def test_a_lost_end_of_a_message_whose_bound_is_met_is_said_again():
    """The last burst said LAST and was lost, and so was END behind it; then END is: nothing is repaired, and the receiver waits
    for it."""
    bench = Bench()
    bench.send(numbers(100), budget=0.5)
    headers = bench.leave()
    assert headers[-2].cls & wire.LAST
    assert headers[-1].type == Type.END
    for _ in range(3):
        bench.now += 0.05
        bench.sender.queue_control(Control(Type.PING, 0, cls=headers[-1].cls & 3))
        behind = bench.leave()
        bench.now += RTT_S
        bench.feedback(
            *[h for h in data_of(headers) if h.burst < 2], *[h for h in behind if h.type is Type.PING]
        )
        bench.now += 0.05
        bench.sender.on_timer(bench.now)
        assert Type.END in {header.type for header in bench.leave()}


def test_controls_share_a_datagram_but_copies_do_not():
    bench = Bench()
    for number in (1, 2, 2, 3):
        bench.sender.queue_control(Control(Type.PING, number))
    bursts = []
    while (burst := bench.sender.next_burst(bench.now)) is not None:
        bursts.append([wire.decode_header(record).message for record in split(burst)])
    assert bursts == [[1, 2], [2, 3]]
    assert bench.sender.datagrams_sent == 2


def test_a_bundle_is_no_longer_than_a_datagram():
    bench = Bench()
    for number in range(100):
        bench.sender.queue_control(Control(Type.OPEN, number, bytes(75)))
    sizes = []
    while (burst := bench.sender.next_burst(bench.now)) is not None:
        assert isinstance(burst, Burst)
        sizes.append(len(burst.data))
    assert sum(sizes) == 100 * 123 and max(sizes) <= 1464 and len(sizes) == 10


def test_chunks_leave_as_they_are_offered():
    bench = Bench()
    out = bench.send(numbers(10), offered=False)
    assert data_of(bench.leave()) == []
    out.offer(4, 2)
    assert [header.chunk for header in data_of(bench.leave())] == [4, 5]
    out.offer(0, 4)
    out.offer(6, 4)
    assert [header.chunk for header in data_of(bench.leave())] == [0, 1, 2, 3, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [5_000, 60_000, 300_000, 1 << 20])
def test_credit_is_never_exceeded(window):
    """Whatever is acknowledged in whatever order; one datagram may always be under way."""
    rng = np.random.default_rng(window)
    bench = Bench(window=window)
    bench.send(numbers(2000))
    flying: list[wire.Header] = []
    for _ in range(300):
        for header in data_of(bench.leave(1)):
            flying.append(header)
        assert bench.path.inflight_cost <= max(window, COST) + 3 * COST
        assert len(flying) * COST <= max(window, COST)
        bench.now += 1e-4
        if flying and rng.random() < 0.7:
            number = flying[0].burst
            arrived = [header for header in flying if header.burst == number]
            flying = flying[len(arrived) :]
            bench.feedback(*arrived, window=window)
    assert bench.sender.datagrams_sent > 100 * window / (1 << 20)


def test_credit_that_shrinks_stops_the_sender_until_enough_is_acknowledged():
    bench = Bench(window=44 * 2 * COST)
    bench.send(numbers(500))
    first = bench.leave()
    bench.now += RTT_S
    bench.feedback(*data_of(first)[:20], window=10 * COST)
    assert data_of(bench.leave()) == []
    bench.feedback(*data_of(first), window=10 * COST)
    assert len(data_of(bench.leave())) == 9, "OPEN is still under way"


def test_a_sender_waits_until_half_its_window_is_free_unless_it_repairs():
    """What trickles free is not worth a system call and an answer each time."""
    bench = Bench(window=1 << 20)
    bench.send(numbers(2000))
    first = data_of(bench.leave())
    assert first[-1].cls & wire.ASK, "the last that fits asks for feedback"
    bench.now += RTT_S
    for header in first:
        bench.feedback(header)
        if sent := data_of(bench.leave()):
            assert len(sent) > 20
            break
    else:
        raise AssertionError("nothing left after all was acknowledged")


def test_no_burst_leaves_that_the_mask_window_does_not_cover():
    bench = Bench(window=1 << 30)
    bench.path.note_late(0.0, bench.now)  # else burst 0 is lost at once, and holds nothing
    out = bench.send(numbers(60 * 600), offered=False)
    out.granted, out.limit = True, 60 * 600
    for chunk in range(0, 60 * 600, 2):
        out.offer(chunk, 1)
    headers = data_of(bench.leave())
    assert len({header.burst for header in headers}) == wire.MASK_WINDOW
    bench.now += RTT_S
    bench.feedback(*[header for header in headers if header.burst != 0], window=1 << 30)
    assert data_of(bench.leave()) == [], "burst 0 holds the window"
    bench.feedback(*[header for header in headers if header.burst == 0], window=1 << 30)
    assert len({header.burst for header in data_of(bench.leave())}) == wire.MASK_WINDOW


def test_without_a_grant_only_the_early_pool_leaves():
    bench = Bench(early=10 * CHUNK)
    out = bench.send(numbers(100))
    assert len(data_of(bench.leave())) == 10
    assert out.blocked()
    bench.feedback(grants=[(out.id, 30)])
    assert [header.chunk for header in data_of(bench.leave())] == list(range(10, 30))
    bench.feedback(grants=[(out.id, 20), (out.id + 1, 50)])
    assert data_of(bench.leave()) == [], "grants are absolute: a lower one takes nothing and gives nothing"
    bench.feedback(grants=[(out.id, 100)])
    assert len(data_of(bench.leave())) == 70


def test_the_early_pool_is_shared_and_comes_back():
    bench = Bench(early=10 * CHUNK)
    first = bench.send(numbers(8), step=0)
    second = bench.send(numbers(8), step=1)
    assert (first.limit, second.limit) == (8, 8), "a message that fits but for its end leaves whole"
    third = bench.send(numbers(100), step=2)
    assert third.limit == 0
    bench.feedback(grants=[(first.id, 8)])
    assert third.limit == 2, "what came back is for who waits"
    assert bench.send(numbers(100), step=3).limit == 0


def test_a_blocked_sender_asks_for_a_lost_grant():
    bench = Bench(early=CHUNK)
    out = bench.send(numbers(100))
    headers = bench.leave()
    assert data_of(headers)[-1].cls & wire.ASK, "the last that may leave asks for a grant"
    bench.now += RTT_S
    bench.feedback(*headers)
    assert bench.sender.next_timeout() == float("inf")
    bench.sender.arm_if_blocked(bench.now)
    bench.timer(bench.sender.next_timeout())
    assert {header.type for header in bench.leave()} == {Type.PING}
    assert out.blocked()


def test_a_full_window_asks_for_feedback():
    bench = Bench(window=44 * COST)
    bench.send(numbers(200))
    headers = data_of(bench.leave())
    assert headers[-1].cls & wire.ASK


def test_only_credit_that_bursts_use_whole_goes_without_asking():
    """There the peer tells of each third by itself; it does not know of a window of congestion control."""

    def asks(bench: Bench) -> bool:
        return bool(data_of(bench.leave())[-1].cls & wire.ASK)

    def bench_of(window: int) -> Bench:
        bench = Bench(window=window)
        bench.path.whole_bursts = True
        bench.send(numbers(200))
        return bench

    assert not asks(bench_of(44 * COST))
    lossy = bench_of(44 * COST)
    lossy.path.lost_lately = 1.0
    assert asks(lossy)
    narrow = bench_of(1 << 20)
    narrow.path.congestion.window_bytes = 44.0 * CHUNK
    assert asks(narrow)


def test_the_end_of_all_that_waits_asks_for_nothing():
    """FINAL answers it: a window that has no room for more matters to nobody. Where something was lost lately, or more waits, it
    asks."""

    def asks(bench: Bench) -> bool:
        return bool(data_of(bench.leave())[-1].cls & wire.ASK)

    bench = Bench(window=44 * COST)
    bench.send(numbers(40))
    assert not asks(bench)
    bench = Bench(window=44 * COST)
    bench.path.lost_lately = 1.0
    bench.send(numbers(40))
    assert asks(bench)
    bench = Bench(window=44 * COST)
    bench.send(numbers(40), step=0)
    bench.send(numbers(40), step=1)
    assert asks(bench), "the second message waits"
    bench = Bench(window=44 * COST)
    bench.send(numbers(40), budget=0.1)
    assert asks(bench), "a bounded message ends sooner for what it hears"


def test_trains_leave_whole_and_number_their_bursts():
    bench = Bench(window=1 << 30, early=1 << 30)
    bench.send(numbers(44 * 5))
    assert bench.leave(1)[0].type == Type.OPEN
    train = bench.sender.next_burst(bench.now)
    assert isinstance(train, Train)
    assert train.bursts == 5
    assert [header.burst for header in map(wire.decode_header, split(train))][::44] == [0, 1, 2, 3, 4]


# --- the end of a message


def test_final_ends_the_message_with_what_the_receiver_did_not_count():
    bench = Bench()
    out = bench.send(numbers(4000), budget=0.5)
    have = np.ones(4000, np.bool_)
    have[[3, 700, 3999]] = False
    parts = wire.final_parts(have)
    assert len(parts) == 2
    bench.sender.on_final(out.id, parts[1], bench.now)
    bench.sender.on_final(out.id, parts[1], bench.now)
    assert bench.outcomes == []
    bench.sender.on_final(out.id, parts[0], bench.now)
    (sent,) = bench.outcomes
    assert isinstance(sent, Sent)
    assert sent.missing.tolist() == [3, 700, 3999]
    bench.sender.on_final(out.id, parts[0], bench.now)
    assert len(bench.outcomes) == 1
    assert bench.path.inflight_bytes == sum(f.nbytes for space in bench.path.spaces for f in space.flights)


def test_an_empty_message_is_an_open_only():
    bench = Bench()
    bench.send(np.empty(0, np.float32))
    assert [header.type for header in bench.leave()] == [Type.OPEN]


def test_the_watermark_waits_for_detached_messages():
    bench = Bench()
    old = bench.send(numbers(2), number=3)
    assert old.detach()
    bench.ended = 7
    bench.send(numbers(2), number=7)
    assert data_of(bench.leave())[-1].watermark == 3
    bench.sender.on_final(old.id, wire.Final(0, 1, b""), bench.now)
    bench.send(numbers(2), number=8)
    assert data_of(bench.leave())[-1].watermark == 7


def test_a_detached_message_has_a_copy():
    bench = Bench(early=0)
    data = numbers(2)
    out = bench.send(data)
    assert out.detach()
    data[:] = -1
    bench.feedback(grants=[(out.id, 2)])
    payloads = []
    while (burst := bench.sender.next_burst(bench.now)) is not None:
        payloads += [d[48:] for d in split(burst) if wire.decode_header(d).type == Type.DATA]
    assert b"".join(payloads) == numbers(2).tobytes()


def test_a_message_that_is_not_all_offered_or_large_cannot_be_detached():
    bench = Bench()
    assert not bench.send(numbers(2), offered=False).detach()
    assert not bench.send(numbers(400), step=1).detach()


def test_paths_take_turns_and_number_their_bursts_apart():
    bench = Bench(paths=3)
    out = bench.send(numbers(30), offered=False)
    seen = []
    for chunk in range(6):
        out.offer(chunk, 1)
        seen += [(header.path, header.burst) for header in data_of(bench.leave())]
    assert sorted(seen) == [(path, burst) for path in range(3) for burst in range(2)]


def test_pacing_spreads_bursts_of_a_fixed_rate():
    sender = PeerSender(
        rank=0,
        session=1,
        addresses=[address(1)],
        window_bytes=1 << 30,
        config=TransportConfig(congestion="fixed", rate_bps=8e6),
        backlog=Backlog(),
        buffer=BurstBuffer(),
        watermark=lambda group: 0,
        datagram_bytes=1464,
    )
    spec = MessageSpec(nbytes=200 * CHUNK, chunk_bytes=CHUNK)
    sender.send(0, spec, np.zeros(200 * CHUNK, np.uint8), b"", 0.0, offered=True)
    now, last, sent, before = 100.0, 100.0, 0, 0
    while sender.active and now < 102.0:
        while (burst := sender.next_burst(now)) is not None:
            last, before = now, sent
            sent += sum(map(len, split(burst)))
        sender.paths[0].probe_at = float("inf")
        now = max(sender.next_timeout(), now + 1e-6)
    assert sent > 200 * CHUNK
    assert last - 100.0 == pytest.approx(before * 8 / 8e6, abs=0.1)
    assert last > 100.1


def test_acknowledged_control_does_not_put_off_the_question_for_lost_chunks():
    """Signs of life of another class go on and on, while the last chunks of a message were lost."""
    bench = Bench()
    warm(bench)
    out = bench.send(numbers(3))
    headers = bench.leave()
    bench.now += RTT_S
    bench.feedback(*[header for header in headers if header.cls & 3 == 0])
    asked_at = float("inf")
    for _ in range(100):
        bench.sender.queue_control(Control(Type.PING, 0))
        pings = bench.leave()
        bench.now += 2e-3
        bench.feedback(*[header for header in pings if header.type == Type.PING])
        if bench.sender.next_timeout() <= bench.now:
            asked_at = min(asked_at, bench.now)
            bench.timer(bench.now)
            break
    assert asked_at < 100.0 + 2 * RTT_S + 2 * bench.path.rto
    assert any(header.type == Type.END and header.message == out.id for header in bench.leave())
