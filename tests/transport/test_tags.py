"""Messages whose chunks have classes: the order in which they leave and are repaired, and that no critical chunk ever misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.transport import wire
from dblp.transport.config import HEADER_BYTES, TransportConfig
from dblp.transport.drop import Drop
from dblp.transport.lanes import UNRANKED_CLASS
from dblp.transport.message import MessageSpec, most_critical
from dblp.transport.outgoing import Outgoing
from dblp.transport.policy import Stop
from dblp.transport.send_path import LOSSY_MEMORY_S
from dblp.transport.wire import Type
from tests.transport.cores import CHUNK, LATENCY_S, Cores, deliver_all, numbers, spec_of
from tests.transport.test_receive_paths import random_classes

RTT_S = 2 * LATENCY_S


def classes_of(text: str) -> np.ndarray:
    """One digit a chunk."""
    return np.array([int(digit) for digit in text], np.uint8)


def sent_chunks(cores: Cores) -> list[tuple[int, int]]:
    """(class, chunk) of all data that left, in order."""
    return [(h.cls & wire.CLASS_MASK, h.chunk) for _, h, _ in cores.sent if h.type == Type.DATA]


def exchange(cores: Cores, data: np.ndarray, classes: np.ndarray, *, until: float = 10.0, **options: Any):
    """Rank 0 sends to rank 1, in a round of both; returns the sink."""
    cores.begin()
    sink = cores.receive(1, 0, data, scatter=True, **options)
    cores.send(0, 1, data, classes=classes, **options)
    cores.run(until, stop=lambda: len(cores.outcomes) == 2)
    return sink


def first_times(sent: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Each chunk once, where it left first."""
    seen: dict[int, tuple[int, int]] = {}
    for cls, chunk in sent:
        seen.setdefault(chunk, (cls, chunk))
    return list(seen.values())


def first_lost(chunks: set[int], *, times: int = 1):
    """Loses these chunks the first ``times`` times."""
    left = dict.fromkeys(chunks, times)

    def tamper(header: wire.Header, datagram: bytes, target: int):
        if header.type == Type.DATA and left.get(header.chunk, 0) > 0:
            left[header.chunk] -= 1
            return []
        return deliver_all(header, datagram, target)

    return tamper


# --- order


def test_chunks_leave_class_by_class_and_each_burst_has_one_class():
    cores, data = Cores(), numbers(300.5)
    cores.remember_loss()
    classes = random_classes(301, np.random.default_rng(0))
    sink = exchange(cores, data, classes)
    assert (sink.array == data).all() and (sink.times == 1).all() and (sink.told == 1).all()
    sent = sent_chunks(cores)
    assert [cls for cls, _ in sent] == sorted(classes.tolist())
    assert all(classes[chunk] == cls for cls, chunk in sent)
    assert cores.delivered().chunks_sent == 301 and cores.delivered().chunks_resent == 0


def test_where_nothing_is_lost_all_but_the_critical_ones_leave_as_they_lie():
    """Sorting them would cost both hosts half as much again, and nothing is left behind."""
    cores, data = Cores(), numbers(300.5)
    classes = random_classes(301, np.random.default_rng(0))
    sink = exchange(cores, data, classes)
    assert (sink.array == data).all()
    critical = np.flatnonzero(classes == 0).tolist()
    others = np.flatnonzero(classes).tolist()
    assert sent_chunks(cores) == [(0, chunk) for chunk in critical] + [(UNRANKED_CLASS, c) for c in others]


def test_by_value_always_is_from_the_first_datagram_on():
    cores, data = Cores(config=TransportConfig(by_value="always")), numbers(300)
    classes = random_classes(300, np.random.default_rng(3))
    exchange(cores, data, classes)
    assert [cls for cls, _ in sent_chunks(cores)] == sorted(classes.tolist())
    with pytest.raises(ConfigError, match=r"by_value='never': known are 'lossy', 'always'"):
        TransportConfig(by_value="never")


@pytest.mark.parametrize("stop", [Stop.EAGER, Stop.DEADLINE])
def test_what_may_be_left_behind_without_a_loss_is_always_sent_by_value(stop):
    cores, data = Cores(), numbers(300)
    classes = random_classes(300, np.random.default_rng(1))
    spec = MessageSpec(nbytes=data.nbytes, chunk_bytes=CHUNK, budget=0.1, stop=stop, stop_after_s=1.0)
    exchange(cores, data, classes, spec=spec)
    assert [cls for cls, _ in sent_chunks(cores)] == sorted(classes.tolist())


def test_a_path_that_lost_chunks_is_sent_by_value_until_it_has_lost_none_for_long():
    cores, data = Cores(), numbers(600)
    classes = random_classes(600, np.random.default_rng(2))

    def order(number: int) -> list[int]:
        cores.outcomes.clear()
        cores.sent.clear()
        cores.begin(number)
        cores.receive(1, 0, data, number=number, budget=0.2)
        cores.send(0, 1, data, classes=classes, number=number, budget=0.2)
        cores.run(cores.now + 5.0, stop=lambda: len(cores.outcomes) == 2)
        return [cls for cls, chunk in first_times(sent_chunks(cores))]

    by_value = sorted(classes.tolist())
    cores.tamper = first_lost(set(np.flatnonzero(classes)[300::5].tolist()))
    assert order(0) != by_value, "nothing was known of the loss"
    cores.tamper = deliver_all
    assert order(1) == by_value
    assert order(2) == by_value
    cores.now += LOSSY_MEMORY_S
    order(3)  # its acknowledgements say that the time is over
    assert order(4) != by_value


@pytest.mark.parametrize(("budget", "by_value"), [(0.05, True), (0.8, False)])
def test_the_order_is_worth_its_cost_where_a_quarter_of_the_bound_is_lost(budget, by_value):
    """8 % are lost: nothing of a message that may lose 80 % will have to be repaired."""
    cores, data = Cores(), numbers(600)
    classes = random_classes(600, np.random.default_rng(4))
    rng = np.random.default_rng(5)
    cores.tamper = lambda header, datagram, target: (
        [] if header.type == Type.DATA and rng.random() < 0.08 else [(0.0, datagram)]
    )
    for number in range(2):
        cores.outcomes.clear()
        cores.sent.clear()
        cores.begin(number)
        cores.receive(1, 0, data, number=number, budget=budget)
        cores.send(0, 1, data, classes=classes, number=number, budget=budget)
        cores.run(cores.now + 5.0, stop=lambda: len(cores.outcomes) == 2)
    order = [cls for cls, _ in first_times(sent_chunks(cores))]
    assert (order == sorted(classes.tolist())) is by_value


def test_the_loss_of_a_path_that_died_says_nothing_of_the_one_that_comes_back():
    path = Cores().cores[0].senders[1].paths[0]
    path.settle(1000, 500, 0.0)
    assert path.worst_loss > 0.3
    path.forget_fates()
    path.settle(100, 0, 1.0)
    assert path.worst_loss == 0.0


def test_what_waits_when_a_burst_of_loss_begins_goes_on_by_value():
    out = Outgoing(
        0,
        spec_of(numbers(8), 0.5),
        numbers(8).view(np.uint8),
        bytearray(HEADER_BYTES),
        2,
        classes_of("31203132"),
        ranked=False,
    )
    out.raise_limit(8)
    out.offer(0, 8)
    taken: list[tuple[int, int]] = []

    def take() -> None:
        out.aim()
        taken.extend((out.cls, int(chunk)) for chunk in out.take_tagged(2))

    take()
    take()
    assert taken == [(0, 3), (UNRANKED_CLASS, 0), (UNRANKED_CLASS, 1)]
    assert out.end_cls == UNRANKED_CLASS
    out.hurry()
    for _ in range(3):
        take()
    assert taken[3:] == [(1, 5), (2, 2), (2, 7), (3, 4), (3, 6)]
    assert out.end_cls == 3, "its END leaves behind all of them"


def test_what_is_offered_bit_by_bit_leaves_in_order_of_class_as_far_as_it_is_there():
    cores, data = Cores(), numbers(8)
    cores.remember_loss()
    cores.begin()
    cores.receive(1, 0, data)
    out = cores.send(0, 1, data, classes=classes_of("31203132"), offered=False)
    out.portion = 1  # what is offered leaves, however little it is
    out.offer(0, 2)
    cores.run(cores.now + RTT_S)
    out.offer_scattered(np.array([3, 4, 7], np.uint32))
    out.offer(2, 1)
    out.offer(5, 2)
    cores.run(cores.now + 1.0)
    assert sent_chunks(cores) == [(1, 1), (3, 0), (0, 3), (1, 5), (2, 2), (2, 7), (3, 4), (3, 6)]
    assert cores.received().missing.tolist() == []


def test_offers_with_gaps_of_a_message_without_classes():
    cores, data = Cores(), numbers(10)
    cores.begin()
    sink = cores.receive(1, 0, data)
    out = cores.send(0, 1, data, offered=False)
    out.offer_scattered(np.array([0, 1, 5, 7, 8], np.uint32))
    out.offer_scattered(np.array([2, 3, 4, 6, 9], np.uint32))
    cores.run(stop=lambda: len(cores.outcomes) == 2)
    assert (sink.array == data).all()


# --- what must arrive


def test_critical_chunks_are_repaired_although_the_bound_is_met():
    cores, data, classes = Cores(), numbers(40), classes_of("0123" * 4 + "2" * 24)
    cores.tamper = first_lost({0, 4, 3, 7, 11})
    exchange(cores, data, classes, budget=0.25)
    assert cores.received().missing.tolist() == [3, 7, 11], "within the budget: not repaired"
    assert cores.delivered().missing.tolist() == [3, 7, 11]
    assert cores.delivered().chunks_resent == 2


@pytest.mark.parametrize("stop", [Stop.EAGER, Stop.STALL, Stop.DEADLINE])
def test_no_stop_rule_ends_a_message_that_lacks_a_critical_chunk(stop):
    """The critical chunk is lost ten times; everything else has come long before."""
    cores, data, classes = Cores(), numbers(40), classes_of("2" * 39 + "0")
    cores.tamper = first_lost({39}, times=10)
    spec = spec_of(data, 0.5, stop)
    began = cores.now
    cores.begin()
    cores.receive(1, 0, data, spec=spec)
    cores.send(0, 1, data, classes=classes, spec=spec)
    cores.run(stop=lambda: "received" in cores.outcomes)
    assert cores.now - began > 10 * RTT_S
    assert 39 not in cores.received().missing


def test_an_eager_message_ends_with_its_last_critical_chunk():
    cores, data, classes = Cores(), numbers(40), classes_of("1" * 39 + "0")

    def tamper(header, datagram, target):
        """The critical chunk is slow, and most others are slower."""
        slow = header.type == Type.DATA and header.chunk >= 30
        slower = 20e-3 if header.chunk < 39 else 10e-3
        return [(slower if slow else 0.0, datagram)]

    cores.tamper = tamper
    began = cores.now
    cores.begin()
    cores.receive(1, 0, data, budget=0.5, stop=Stop.EAGER)
    cores.send(0, 1, data, classes=classes, budget=0.5, stop=Stop.EAGER)
    cores.run(stop=lambda: "received" in cores.outcomes)
    assert cores.now - began == pytest.approx(LATENCY_S + 10e-3)
    assert cores.received().missing.tolist() == list(range(30, 39))


def test_a_repeated_critical_chunk_does_not_stand_for_another():
    cores, data, classes = Cores(), numbers(40), classes_of("00" + "3" * 38)
    seen: list[int] = []

    def tamper(header, datagram, target):
        if header.type == Type.DATA and header.chunk == 1:
            seen.append(1)
            return [] if len(seen) < 3 else [(0.0, datagram)]
        return [(0.0, datagram)] * (3 if header.chunk == 0 else 1)

    cores.tamper = tamper
    sink = exchange(cores, data, classes, budget=0.5, stop=Stop.EAGER)
    assert len(seen) == 3 and sink.times[0] == sink.times[1] == 1


@pytest.mark.parametrize("lost_opens", [0, 1, 3])
def test_critical_chunks_that_come_before_the_receive_or_before_open_count(lost_opens):
    cores, data, classes = Cores(), numbers(40), classes_of("0" * 4 + "2" * 36)
    opens = [0]

    def tamper(header, datagram, target):
        if header.type == Type.OPEN and opens[0] < lost_opens:
            opens[0] += 1
            return []
        lost = header.type == Type.DATA and header.chunk in (5, 6)
        return [] if lost else [(0.0, datagram)]

    cores.tamper = tamper
    cores.begin()
    cores.send(0, 1, data, classes=classes, budget=0.1)
    cores.run(cores.now + 3 * RTT_S)
    sink = cores.receive(1, 0, data, budget=0.1, scatter=True)
    cores.run(stop=lambda: len(cores.outcomes) == 2)
    assert opens[0] == lost_opens
    assert cores.received().missing.tolist() == [5, 6]
    assert (sink.times == [1] * 5 + [0] * 2 + [1] * 33).all()


# --- repair


def test_of_what_must_be_repaired_the_most_valuable_goes_first():
    """14 chunks are lost, 10 may miss: as many as make it likely that enough arrive are repaired, class by class."""
    cores, data = Cores(), numbers(100)
    classes = classes_of("1123" * 25)
    lost = set(range(20, 34))
    cores.tamper = first_lost(lost)
    cores.remember_loss()
    exchange(cores, data, classes, budget=0.1)
    again = sent_chunks(cores)[100:]
    assert [cls for cls, _ in again] == sorted(cls for cls, _ in again)
    repaired = list(dict.fromkeys(chunk for _, chunk in again))
    assert repaired == sorted(lost, key=lambda chunk: (classes[chunk], chunk))[: len(repaired)]
    assert set(cores.received().missing.tolist()) == lost - set(repaired)
    assert 4 <= len(repaired) <= 12, "no more than the excess and what the path may lose of it again"


def test_loss_of_critical_chunks_is_noticed_by_what_comes_behind_in_other_classes():
    """No question, no timeout: the first feedback tells."""
    cores, data = Cores(), numbers(400)
    classes = np.full(400, 2, np.uint8)
    classes[:5] = 0
    exchange(cores, data[: 100 * 352], np.full(100, 2, np.uint8))  # a round trip is known
    cores.sent.clear()
    cores.outcomes.clear()
    cores.tamper = first_lost({0, 1, 2, 3, 4})
    cores.begin(1)
    cores.receive(1, 0, data, number=1, budget=0.1)
    began = cores.now
    cores.send(0, 1, data, number=1, classes=classes, budget=0.1)
    cores.run(stop=lambda: "received" in cores.outcomes)
    assert cores.now - began < cores.cores[0].senders[1].paths[0].rto + RTT_S
    assert not any(header.type in (Type.PING, Type.END) for _, header, _ in cores.sent[:-10])
    assert cores.received().missing.tolist() == []


@pytest.mark.parametrize("reorders", [False, True])
def test_a_whole_class_that_is_lost_goes_again_with_the_first_news_of_a_less_urgent_one(reorders):
    """Both left together, and no question was needed for the first; on a path that has been seen to reorder, age is."""
    cores, data = Cores(), numbers(60)
    classes = classes_of("1" * 24 + "3" * 36)
    exchange(cores, numbers(60), np.full(60, 2, np.uint8))  # a round trip is known
    cores.sent.clear()
    cores.outcomes.clear()
    if reorders:
        cores.cores[0].senders[1].paths[0].note_late(0.0, cores.now)
    cores.tamper = first_lost(set(range(24)))
    cores.begin(1)
    cores.receive(1, 0, data, number=1, budget=0.1)
    began = cores.now
    cores.send(0, 1, data, number=1, classes=classes, budget=0.1)
    cores.run(stop=lambda: "received" in cores.outcomes)
    took = cores.now - began
    assert (took < 1.6 * RTT_S) is not reorders, "there and back, and there again"


def test_an_arrival_of_a_more_urgent_class_is_no_evidence():
    """A switch with priorities holds class 3 up for long: nothing of it is sent again."""
    cores, data, classes = Cores(), numbers(60), classes_of("0" * 6 + "1" * 24 + "3" * 30)

    def tamper(header, datagram, target):
        held_up = header.type in (Type.DATA, Type.END) and header.cls & wire.CLASS_MASK == 3
        return [(15 * RTT_S if held_up else 0.0, datagram)]

    cores.tamper = tamper
    exchange(cores, data, classes)
    assert cores.delivered().chunks_resent == 0


def test_feedback_that_was_lost_does_not_make_arrived_chunks_lost():
    """Class 0 was acknowledged in a feedback that got lost; later ones, on class 2, tell of it again."""
    cores, data = Cores(), numbers(200)
    classes = np.full(200, 2, np.uint8)
    classes[:20] = 0
    exchange(cores, data[: 100 * 352], np.full(100, 2, np.uint8))  # a round trip is known
    known = cores.cores[1].receivers[0].paths[0].spaces[0].highest
    lost = [0]

    def tamper(header, datagram, target):
        """The first feedback that tells of class 0 is lost."""
        if header.type == Type.FEEDBACK and not lost[0]:
            feedback = wire.decode_feedback(datagram[HEADER_BYTES:])
            assert feedback is not None
            lost[0] = any(
                space.cls == 0 and space.base + space.count > known + 2 for space in feedback.spaces
            )
            return [] if lost[0] else [(0.0, datagram)]
        return [(0.0, datagram)]

    cores.outcomes.clear()
    cores.tamper = tamper
    cores.begin(1)
    cores.receive(1, 0, data, number=1, budget=0.1)
    out = cores.send(0, 1, data, number=1, classes=classes, budget=0.1, offered=False)
    for first in range(0, 200, 20):  # the critical ones first, then some others every half round trip
        out.offer(first, 20)
        cores.run(cores.now + LATENCY_S)
    cores.run(stop=lambda: len(cores.outcomes) == 2)
    assert lost[0]
    assert cores.delivered().chunks_resent == 0


# --- random losses


@pytest.mark.parametrize("seed", range(40))
def test_any_loss_by_class_on_any_paths(seed):
    rng = np.random.default_rng(seed)
    chunks = float(rng.choice([1, 7, 90, 400.25]))
    paths = int(rng.choice([1, 1, 3, 4]))
    choice = str(rng.choice(["spray", "reps", "ethereal", "single"]))
    budget = float(rng.choice([0.0, 0.1, 0.4]))
    stop = Stop(str(rng.choice(["eager", "stall", "deadline"])))
    shares = rng.choice([0.0, 0.02, 0.2, 0.6], 4)

    def tamper(header, datagram, target):
        share = shares[header.cls & wire.CLASS_MASK]
        copies = int(rng.random() >= share) + int(rng.random() < 0.05)
        return [(float(rng.exponential(2e-4)), datagram)] * copies

    cores = Cores(config=TransportConfig(paths=paths, path_choice=choice))
    cores.tamper = tamper
    data = numbers(chunks)
    classes = random_classes(-(-data.nbytes // 1408), rng)
    if rng.random() < 0.2:
        classes[:] = rng.integers(1, 4)
    sink = exchange(cores, data, classes, until=60.0, budget=budget, stop=stop)
    missing = cores.received().missing
    assert len(missing) <= int(budget * len(classes))
    assert (classes[missing] > 0).all(), "critical chunks are always there"
    assert cores.delivered().missing.tolist() == missing.tolist()
    assert (sink.times == ~np.isin(np.arange(len(classes)), missing)).all()
    assert (sink.told == sink.times).all()
    here = np.repeat(sink.times, 352)[: len(data)] > 0
    assert (sink.array[here] == data[here]).all()


def test_classes_that_a_network_drops_first_lose_most():
    """What is lost follows the classes where the network's loss does, and repairs don't even it out."""
    rng = np.random.default_rng(5)
    shares = {0: 0.0, 1: 0.0, 2: 0.1, 3: 0.5}
    cores = Cores()
    cores.tamper = lambda header, datagram, target: (
        [] if header.type == Type.DATA and rng.random() < shares[header.cls & 3] else [(0.0, datagram)]
    )
    data, classes = numbers(1000), classes_of("0112233333" * 100)
    cores.remember_loss()
    exchange(cores, data, classes, budget=0.2)
    lost = np.bincount(classes[cores.received().missing], minlength=4)
    assert lost[0] == lost[1] == 0 and lost[3] > 5 * lost[2]
    assert 0.15 * 1000 < lost.sum() <= 0.2 * 1000


# --- what is refused


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (np.zeros(40, np.uint8), "40 of 40 chunks are of class 0: at most 10%"),
        (classes_of("0" * 5 + "1" * 35), "5 of 40"),
        (np.full(40, 4, np.uint8), "class 4"),
        (np.ones(39, np.uint8), "one uint8 for each of 40"),
        (np.ones(40, np.int64), "one uint8 for each of 40"),
    ],
)
def test_classes_that_make_no_sense_are_refused(classes, told):
    cores = Cores()
    cores.begin()
    with pytest.raises(ConfigError, match=told):
        cores.send(0, 1, numbers(40), classes=classes)
    assert cores.cores[0].senders[1].idle(), "nothing was begun"


def test_a_tiny_message_may_be_critical():
    assert [most_critical(chunks) for chunks in (1, 9, 19, 20, 1000)] == [1, 1, 1, 2, 100]
    cores, data = Cores(), numbers(1)
    cores.tamper = first_lost({0}, times=3)
    exchange(cores, data, classes_of("0"), budget=0.9)
    assert cores.received().missing.tolist() == []
    assert cores.delivered().chunks_resent >= 3


def test_an_open_with_too_many_critical_chunks_is_dropped():
    cores, data = Cores(), numbers(40)
    cores.begin()
    cores.receive(1, 0, data, budget=0.5)
    payload = wire.encode_open(wire.Open(spec_of(data, 0.5), b"same", 0.0, (20, 20, 0, 0)))
    header = wire.Header(
        wire.VERSION, Type.OPEN, 0, 0, 1, 0, 0, 0x0123456789ABCDEF, 0, 40, 0, 1000, 0, 0, 0, len(payload)
    )
    cores.inject(1, [wire.encode_header(header) + payload])
    assert cores.cores[1].drops[Drop.PAYLOAD] == 1
    assert cores.cores[1].receivers[0].messages[0].opened is None
