"""One peer's sender, told literal times: masks, loss, probes, repair and copies, feedback that is old or foolish."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dblp.transport import wire
from dblp.transport.flight import Control, Flight
from dblp.transport.message import message_id
from dblp.transport.send_path import (
    PROBE_COPIES,
    REORDER_LIFE_ROUND_TRIPS,
    REORDER_LIFE_S,
    REORDER_S,
    STEADY_PROBES,
)
from dblp.transport.wire import Type
from tests.transport.cores import numbers, spec_of
from tests.transport.sender_bench import COST, RTT_S, WINDOW, Bench, data_of, send_bursts, warm

# --- loss


def test_where_nothing_was_ever_reordered_what_was_overtaken_is_lost_at_once():
    bench = Bench()
    warm(bench)
    out, bursts = send_bursts(bench, 3)
    bench.now += 1e-4
    bench.feedback(bursts[1][2])
    assert out.lost.tolist() == [0, 1, 2, 3], (
        "a whole burst; two of the next may have been passed by the third"
    )
    assert [header.chunk for header in data_of(bench.leave())] == [0, 1, 2, 3]
    bench.feedback(bursts[2][3])
    assert out.lost.tolist() == [4, 5, 7]
    assert not bench.path.reorders
    bench.feedback(*bursts[0])
    assert bench.path.reorders, "it had only been late: from now on age decides"
    later, bursts = send_bursts(bench, 2)
    bench.now += 1e-4
    bench.feedback(*bursts[1])
    assert len(later.lost) == 0


def test_what_was_overtaken_and_is_old_is_lost():
    bench = Bench()
    warm(bench)
    bench.path.note_late(0.0, bench.now)
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


def late_by(bench: Bench, late_s: float) -> None:
    """What was declared lost comes ``late_s`` behind what followed it."""
    _, bursts = send_bursts(bench, 3)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[2], sent_s=bench.now - RTT_S)
    bench.now += late_s
    bench.feedback(*bursts[0], *bursts[2])


def test_the_allowance_is_forgotten_when_nothing_comes_late_any_more():
    """One datagram that a busy processor held up put off every repair of a training run."""
    bench = Bench()
    warm(bench)
    late_by(bench, 40e-3)
    first_s = bench.path.reorder_s
    assert first_s > 40e-3
    bench.now += 0.9 * REORDER_LIFE_S
    late_by(bench, 4e-3)
    assert bench.path.reorder_s == first_s
    bench.now += 0.9 * REORDER_LIFE_S
    bench.path.forget_reordering(bench.now)
    assert bench.path.reorders and bench.path.reorder_s == first_s, "of the life before"
    bench.now += 1.1 * REORDER_LIFE_S
    bench.path.forget_reordering(bench.now)
    assert not bench.path.reorders and bench.path.reorder_s == REORDER_S


def test_on_a_long_path_the_allowance_lasts_for_some_round_trips():
    bench = Bench()
    warm(bench)
    bench.path.srtt = 1.0
    late_by(bench, 40e-3)
    bench.now += 0.9 * REORDER_LIFE_ROUND_TRIPS
    bench.path.forget_reordering(bench.now)
    assert bench.path.reorders
    bench.now += 2.1 * REORDER_LIFE_ROUND_TRIPS
    bench.path.forget_reordering(bench.now)
    assert not bench.path.reorders


def test_the_allowance_stays_while_things_come_late_that_were_not_declared_lost():
    """With the allowance nothing is declared lost in vain, and so nothing would come after it had been."""
    bench = Bench()
    warm(bench)
    late_by(bench, 20e-3)
    for _ in range(8):
        bench.now += 0.4 * REORDER_LIFE_S
        _, bursts = send_bursts(bench, 2)
        bench.feedback(*bursts[1], sent_s=bench.now - 1e-3)
        bench.now += 15e-3
        bench.feedback(*bursts[0], *bursts[1], sent_s=bench.now - 16e-3)
    assert bench.path.reorders and 1e-3 < bench.path.reorder_s < 20e-3, (
        "what is seen now, not what was seen once"
    )


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


@pytest.mark.parametrize("who", ["we", "the peer"])
def test_hosts_that_are_behind_send_no_copies(who):
    """They would read them later still; so would they notice the end of the burst."""
    bench = Bench()
    if who == "we":
        bench.backlog.note(0.1, now=bench.now)
    else:
        bench.peer_behind_us = 100_000
    assert lose_most(bench)[1] == list(range(36))
    assert bench.path.question_copies() <= 2


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
        bench.sender.fates.on_lost(bench.path, bench.path.spaces[1], flight, bench.now)
    assert not len(out.lost)
    bench.sender.fates.on_lost(bench.path, bench.path.spaces[1], flights[-1], bench.now)
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
