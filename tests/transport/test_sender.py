"""One peer's sender, told literal times: credit, masks, loss, probes, repair, grants, watermarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.burst import BurstBuffer, Train
from dblp.transport.config import TransportConfig
from dblp.transport.flight import Control, Flight
from dblp.transport.message import MessageSpec, Sent, message_id
from dblp.transport.port import Burst
from dblp.transport.send_path import PACKET_OVERHEAD_BYTES, PROBE_COPIES, STEADY_PROBES
from dblp.transport.sender import PeerSender
from dblp.transport.wire import Type
from tests.transport.cores import CHUNK, address, numbers, spec_of, split

WINDOW = 1 << 20
COST = CHUNK + 48 + PACKET_OVERHEAD_BYTES
RTT_S = 10e-3


class Bench:
    """A sender, what it sent, and feedback made by hand."""

    def __init__(
        self,
        *,
        window: int = WINDOW,
        early: int = 1 << 20,
        paths: int = 1,
        congestion: str = "fixed",
        copies: int = 8,
    ) -> None:
        self.ended = 0
        self.sender = PeerSender(
            rank=0,
            session=1,
            addresses=[address(1, path) for path in range(paths)],
            window_bytes=window,
            config=TransportConfig(congestion=congestion, paths=paths, copies=copies),
            buffer=BurstBuffer(),
            watermark=lambda group: self.ended,
            datagram_bytes=1464,
        )
        self.sender._early_bytes = early
        self.feedbacks = 0
        self.now = 100.0
        self.outcomes: list[object] = []

    @property
    def path(self):
        return self.sender.paths[0]

    def send(
        self, data: np.ndarray, *, budget: float = 0.0, number: int = 0, step: int = 0, offered: bool = True
    ):
        spec = spec_of(data, budget)
        out = self.sender.send(
            message_id(0, number, step), spec, data.view(np.uint8), b"s", 0.0, offered=offered
        )
        out.on_done = self.outcomes.append
        out.portion = 1  # what is offered leaves, however little it is
        return out

    def leave(self, most: int = 10_000) -> list[wire.Header]:
        """Headers of all that leaves now, at most ``most`` bursts."""
        headers: list[wire.Header] = []
        while most and (burst := self.sender.next_burst(self.now)) is not None:
            headers += [wire.decode_header(datagram) for datagram in split(burst)]
            most -= 1
        return headers

    def feedback(
        self,
        *arrived: wire.Header,
        sent_s: float | None = None,
        window: int = WINDOW,
        asked: bool = False,
        grants: Sequence[tuple[int, int]] = (),
        number: int | None = None,
    ) -> None:
        """The peer says now that these datagrams have come, the last of them sent at ``sent_s``."""
        spaces = []
        for cls in sorted({header.cls & 3 for header in arrived}):
            bursts = [(h.burst, h.position) for h in arrived if h.cls & 3 == cls]
            base = min(burst for burst, _ in bursts)
            masks = 0
            for burst, position in bursts:
                masks |= 1 << (64 * (burst - base) + position)
            spaces.append(wire.Space(cls, base, max(burst for burst, _ in bursts) - base + 1, masks))
        echo = wire.clock_us(self.now - RTT_S if sent_s is None else sent_s)
        if number is None:
            number = self.feedbacks
            self.feedbacks += 1
        report = wire.Feedback(echo, 0, window, asked, tuple(grants), tuple(spaces))
        self.sender.on_feedback(0, number, report, self.now, self.now)

    def timer(self, at: float) -> None:
        self.now = at
        self.sender.on_timer(at)


def data_of(headers: list[wire.Header]) -> list[wire.Header]:
    return [header for header in headers if header.type == Type.DATA]


def bursts_of(headers: list[wire.Header]) -> list[int]:
    return sorted({header.burst for header in data_of(headers)})


def warm(bench: Bench) -> None:
    """A first round trip of ``RTT_S``."""
    bench.send(numbers(1), number=0, step=9)
    headers = bench.leave()
    bench.now += RTT_S
    bench.feedback(*headers)
    bench.sender.on_final(message_id(0, 0, 9), wire.Final(0, 1, b""), bench.now)
    assert bench.path.srtt == pytest.approx(RTT_S, rel=0.01)


# --- what leaves


def test_open_leaves_before_the_chunks_and_the_last_burst_says_that_it_is_the_last():
    bench = Bench()
    bench.send(numbers(100.5))
    headers = bench.leave()
    assert headers[0].type == Type.OPEN
    assert [header.chunk for header in data_of(headers)] == list(range(101))
    assert all(bool(h.cls & wire.LAST) == (h.burst == headers[-1].burst) for h in data_of(headers))
    assert headers[-1].type == Type.DATA


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
    headers = data_of(bench.leave())
    bench.now += RTT_S
    bench.feedback(*[h for h in headers if h.chunk != 99])
    assert [header.type for header in bench.leave()] == [Type.END]


def test_a_lost_end_of_a_message_whose_bound_is_met_is_said_again():
    """The last burst said LAST and was lost; then END is: nothing is repaired, and the receiver waits for it."""
    bench = Bench()
    bench.send(numbers(100), budget=0.5)
    headers = bench.leave()
    assert headers[-1].cls & wire.LAST
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
    out = bench.send(numbers(60 * 300), offered=False)
    out.granted, out.limit = True, 60 * 300
    for chunk in range(0, 60 * 300, 2):
        out.offer(chunk, 1)
    headers = data_of(bench.leave())
    assert len({header.burst for header in headers}) == wire.MASK_WINDOW
    bench.now += RTT_S
    bench.feedback(*[header for header in headers if header.burst != 0])
    assert data_of(bench.leave()) == [], "burst 0 holds the window"
    bench.feedback(*[header for header in headers if header.burst == 0])
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
    assert bench.send(numbers(100), step=3).limit == 2


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


def test_trains_leave_whole_and_number_their_bursts():
    bench = Bench(window=1 << 30, early=1 << 30)
    bench.send(numbers(44 * 5))
    assert bench.leave(1)[0].type == Type.OPEN
    train = bench.sender.next_burst(bench.now)
    assert isinstance(train, Train)
    assert train.bursts == 5
    assert [header.burst for header in map(wire.decode_header, split(train))][::44] == [0, 1, 2, 3, 4]


# --- loss


def send_bursts(bench: Bench, count: int, **options: Any):
    """``count`` bursts of 4 chunks, a millisecond apart."""
    out = bench.send(numbers(4 * count), offered=False, **options)
    headers = []
    for at in range(count):
        out.offer(4 * at, 4)
        headers.append(data_of(bench.leave()))
        bench.now += 1e-3
    return out, headers


def test_what_was_overtaken_and_is_old_is_lost():
    bench = Bench()
    warm(bench)
    out, bursts = send_bursts(bench, 3)
    sent_first = bursts[0][0].sent_at
    assert sent_first
    first_sent_at = bench.now - 3e-3
    bench.now = first_sent_at + RTT_S
    bench.feedback(*bursts[1])
    assert len(out.lost) == 0, "overtaken, but not older than a round trip and the reordering allowance"
    due = bench.sender.next_timeout()
    assert due == pytest.approx(first_sent_at + bench.path.loss_delay(), abs=1e-6)
    bench.timer(due)
    assert out.lost.tolist() == [0, 1, 2, 3]
    again = data_of(bench.leave())
    assert [header.chunk for header in again] == [0, 1, 2, 3]
    assert again[0].burst > bursts[2][0].burst, "repairs have new numbers"


def test_single_datagrams_of_a_burst_are_lost_alone():
    bench = Bench()
    warm(bench)
    out, bursts = send_bursts(bench, 2)
    bench.now += 5 * RTT_S
    bench.feedback(bursts[0][0], bursts[0][2], *bursts[1], sent_s=bench.now - RTT_S)
    assert out.lost.tolist() == [1, 3]


def test_silence_is_no_loss_but_a_question():
    bench = Bench()
    warm(bench)
    out = bench.send(numbers(100))
    bench.leave()
    due = bench.sender.next_timeout()
    assert due == pytest.approx(bench.now + bench.path.rto)
    bench.timer(due)
    headers = bench.leave()
    assert {header.type for header in headers} <= {Type.END, Type.PING}
    assert any(header.type == Type.END and header.message == out.id for header in headers)
    assert len(out.lost) == 0


def test_the_answered_question_is_the_evidence():
    bench = Bench()
    warm(bench)
    out = bench.send(numbers(3))
    bench.leave()
    bench.timer(bench.sender.next_timeout())
    probe = [header for header in bench.leave() if header.cls & 3 == 1]
    bench.now += RTT_S
    bench.feedback(probe[0], asked=True)
    bench.timer(max(bench.now, bench.sender.next_timeout()))
    assert out.lost.tolist() == [0, 1, 2]


def test_probes_do_not_back_off_before_the_64th():
    bench = Bench()
    warm(bench)
    bench.send(numbers(3))
    bench.leave()
    gaps = []
    for _ in range(STEADY_PROBES + 12):
        at = bench.sender.next_timeout()
        gaps.append(at - bench.now)
        bench.timer(at)
        bench.leave()
    assert gaps[:STEADY_PROBES] == pytest.approx([gaps[0]] * STEADY_PROBES)
    assert gaps[STEADY_PROBES + 2] > 1.9 * gaps[0]
    assert max(gaps) <= 1.0 + 1e-9
    assert len(bench.path.spaces[1].flights) < 32, "probes of a silent peer do not fill the mask window"


def test_a_late_arrival_raises_the_reordering_allowance():
    bench = Bench()
    warm(bench)
    out, bursts = send_bursts(bench, 3)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[2], sent_s=bench.now - RTT_S)
    assert len(out.lost) == 8
    before = bench.path.loss_delay()
    bench.now += 20e-3
    bench.feedback(*bursts[0], *bursts[2])
    assert bench.path.loss_delay() > before + 10e-3
    assert out.take_lost(100).tolist() == [4, 5, 6, 7], "what came after all is not repaired"


def test_the_allowance_is_bounded():
    bench = Bench()
    warm(bench)
    _, bursts = send_bursts(bench, 3)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[2], sent_s=bench.now - RTT_S)
    bench.now += 60.0
    bench.feedback(*bursts[0], *bursts[2])
    assert bench.path.reorder_s <= 0.5


def test_lost_data_returns_its_credit():
    bench = Bench()
    warm(bench)
    _, bursts = send_bursts(bench, 4)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[3], sent_s=bench.now - RTT_S)
    flying = sum(flight.cost for space in bench.path.spaces for flight in space.flights)
    assert bench.path.inflight_cost == flying < 4 * 4 * COST


@pytest.mark.parametrize("type_", [Type.OPEN, Type.FINAL, Type.ABORT])
def test_reliable_control_is_repeated_until_it_is_acknowledged(type_):
    bench = Bench()
    warm(bench)
    bench.sender.queue_control(Control(type_, 5, b"payload"))
    first = bench.leave()[0]
    for _ in range(5):
        bench.timer(bench.sender.next_timeout())
        probe = bench.leave()[0]
        assert probe.type == Type.PING
        bench.now += RTT_S
        bench.feedback(probe, asked=True)
        bench.timer(max(bench.now, bench.sender.next_timeout()))
        again = [header for header in bench.leave() if header.type == type_]
        assert 1 <= len(again) <= PROBE_COPIES and again[0].burst > first.burst, "in copies where it was lost"
    bench.now += RTT_S
    bench.feedback(again[0], asked=True)
    assert bench.sender.idle()


# --- bounded repair


def test_crumbs_wait_on_a_clean_path_only():
    bench = Bench()
    warm(bench)
    data = numbers(30)
    held = bench.sender.send(
        message_id(0, 0, 1), spec_of(data, 0.0), data.view(np.uint8), b"s", 0.0, offered=False
    )
    held.offer(0, 2)
    assert data_of(bench.leave()) == []
    _, bursts = send_bursts(bench, 10)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[9], sent_s=bench.now - RTT_S)
    sent = {header.message for header in data_of(bench.leave())}
    assert held.id in sent, "news of a loss: they leave"
    late = bench.sender.send(
        message_id(0, 0, 2), spec_of(data, 0.0), data.view(np.uint8), b"s", 0.0, offered=False
    )
    late.offer(0, 2)
    bench.now += RTT_S
    assert late.id in {header.message for header in data_of(bench.leave())}


def test_only_what_exceeds_the_budget_is_repaired():
    bench = Bench()
    warm(bench)
    out, bursts = send_bursts(bench, 10, budget=0.2)
    assert out.may_miss == 8
    bench.now += 2 * RTT_S
    arrived = [header for burst in bursts[2:] for header in burst]
    bench.feedback(*arrived, sent_s=bench.now - RTT_S)
    assert len(out.lost) == 8
    assert data_of(bench.leave()) == []


def test_repair_beyond_the_budget_allows_for_the_path_s_own_loss():
    bench = Bench(copies=1)
    warm(bench)
    out, bursts = send_bursts(bench, 10, budget=0.2)
    bench.now += 2 * RTT_S
    arrived = [header for burst in bursts[4:] for header in burst]
    bench.feedback(*arrived, sent_s=bench.now - RTT_S)
    assert len(out.lost) == 16
    repaired = len(data_of(bench.leave()))
    assert 8 < repaired <= 16, "8 too many are lost; a share of the repairs will be lost as well"


def test_exact_messages_repair_everything():
    bench = Bench()
    warm(bench)
    _, bursts = send_bursts(bench, 10)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[9], sent_s=bench.now - RTT_S)
    assert {header.chunk for header in data_of(bench.leave())} == set(range(36))


# --- copies where much is lost


def lose_most(bench: Bench, window: int = WINDOW, **options: Any):
    """Ten bursts of four chunks, of which the last alone arrives."""
    warm(bench)
    out, bursts = send_bursts(bench, 10, **options)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[9], sent_s=bench.now - RTT_S, window=window)
    assert out.lost.tolist() == list(range(36))
    return out, [header.chunk for header in data_of(bench.leave())]


def test_where_most_is_lost_repairs_of_an_exact_message_leave_in_copies():
    bench = Bench()
    out, repairs = lose_most(bench)
    times = np.bincount(repairs, minlength=40)
    assert set(times[:36]) == {8} and not times[36:].any()
    assert repairs[:36] == list(range(36)) == repairs[36:72], "all leave once before any leaves twice"
    assert bench.path.inflight_cost <= bench.path.window()
    assert out.all_sent and not len(out.lost)


def test_copies_can_be_switched_off():
    assert lose_most(Bench(copies=1))[1] == list(range(36))


def test_copies_take_no_more_than_the_window():
    _, repairs = lose_most(Bench(), window=100 * COST)
    assert np.bincount(repairs).tolist() == [2] * 36, "three copies of 36 would not fit"


def test_different_chunks_leave_before_copies_of_one_do():
    """Of the 36 that are lost all leave; in fewer copies than where none may miss."""
    _, repairs = lose_most(Bench(), budget=0.7)
    assert set(repairs) == set(range(36)) and 36 <= len(repairs) < 8 * 36


def test_a_chunk_is_lost_when_its_last_copy_is():
    bench = Bench()
    out, _ = lose_most(bench)
    flights = [flight for flight in bench.path.spaces[1].flights if flight.message is out]
    assert [flight.decides for flight in flights] == [False] * (len(flights) - 1) + [True]
    for flight in flights[:-1]:
        bench.sender._on_lost(bench.path, bench.path.spaces[1], flight, bench.now)
    assert not len(out.lost)
    bench.sender._on_lost(bench.path, bench.path.spaces[1], flights[-1], bench.now)
    assert out.lost.tolist() == list(range(36))


def test_questions_leave_in_copies_unless_they_are_known_to_arrive():
    bench = Bench()
    lose_most(bench)
    assert bench.path.question_copies() >= 4
    for _ in range(40):
        bench.path.note_question(0)
    assert bench.path.question_copies() <= 2
    for _ in range(40):
        bench.path.note_question(1)
    assert bench.path.question_copies() == PROBE_COPIES


def test_old_loss_calls_for_no_copies():
    bench = Bench()
    lose_most(bench)
    assert bench.path.loses_much(bench.now)
    assert not bench.path.loses_much(bench.now + 2.001 * bench.path.rto)


# --- feedback that is old, repeated or foolish


def test_older_feedback_takes_nothing_back():
    bench = Bench()
    bench.feedback(window=100_000, number=5)
    bench.feedback(window=5_000_000, number=4)
    assert bench.path.window_bytes == 100_000
    bench.feedback(window=200_000, number=6)
    assert bench.path.window_bytes == 200_000


def test_repeated_answers_do_not_put_off_the_next_question():
    bench = Bench()
    warm(bench)
    bench.send(numbers(3))
    bench.leave()
    bench.feedback(asked=True, number=50)
    due = bench.sender.next_timeout()
    for _ in range(20):
        bench.now += 1e-3
        bench.feedback(asked=True, number=50)
    assert bench.sender.next_timeout() == due


def test_a_feedback_without_news_is_no_round_trip():
    """A grant goes out whether or not anything has come: its echo may be of long ago, or of nothing."""
    bench = Bench()
    warm(bench)
    srtt = bench.path.srtt
    bench.feedback(sent_s=bench.now - 50.0)
    assert bench.path.srtt == srtt


@pytest.mark.parametrize("base", [0, 7, 1 << 16, 1 << 31, (1 << 32) - 1])
def test_masks_of_bursts_that_never_left_acknowledge_nothing(base):
    bench = Bench()
    out = bench.send(numbers(88))
    headers = bench.leave()
    top = max(header.burst for header in headers)
    space = wire.Space(1, (top + 1 + base) & 0xFFFFFFFF, 128, (1 << 64 * 128) - 1)
    if base == (1 << 32) - 1:
        space = wire.Space(1, (top + 200) & 0xFFFFFFFF, 128, (1 << 64 * 128) - 1)
    bench.sender.on_feedback(0, 0, wire.Feedback(0, 0, WINDOW, False, (), (space,)), bench.now, bench.now)
    assert not out.acked.any()


def test_numbers_wrap_at_32_bits():
    """After 2^32 bursts, a few hours at 2 GB/s, all goes on."""
    bench = Bench()
    warm(bench)
    bench.path.spaces[1].next_seq = (1 << 32) - 2
    bench.path.spaces[1].largest_acked = ((1 << 32) - 3) * 64
    out, bursts = send_bursts(bench, 4)
    assert [burst[0].burst for burst in bursts] == [0xFFFFFFFE, 0xFFFFFFFF, 0, 1]
    bench.now += RTT_S
    masks = sum(0xF << 64 * at for at in (0, 1, 3))
    space = wire.Space(1, 0xFFFFFFFE, 4, masks)
    echo = wire.clock_us(bench.now - RTT_S)
    bench.sender.on_feedback(0, 1, wire.Feedback(echo, 0, WINDOW, False, (), (space,)), bench.now, bench.now)
    assert np.flatnonzero(~out.acked).tolist() == [8, 9, 10, 11]
    bench.timer(bench.now + 5 * RTT_S)
    assert out.lost.tolist() == [8, 9, 10, 11]


def test_the_end_of_a_train_is_acknowledged_though_its_start_left_the_window():
    message = Bench().send(numbers(44 * 4))
    flight = Flight(10, 44, 0, 0.0, message, 0, None, None, 0, 4)
    assert flight.chunks_at(flight.unacked).tolist() == list(range(176))
    bench = Bench(window=1 << 30, early=1 << 30)
    out = bench.send(numbers(44 * 4))
    headers = data_of(bench.leave())
    bench.now += RTT_S
    bench.feedback(*[header for header in headers if header.burst >= 2])
    assert np.flatnonzero(out.acked).tolist() == list(range(88, 176))


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
