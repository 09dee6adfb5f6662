"""Repairs in passes, MLT's and DBLP's: nothing goes again before the probe behind the pass is answered, and then all goes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.transport import wire
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Stop
from dblp.transport.wire import Type
from tests.transport.cores import Cores, numbers
from tests.transport.sender_bench import RTT_S, Bench, data_of, send_bursts, warm


def bench_of_passes() -> Bench:
    bench = Bench(copies=1, repair="passes")
    warm(bench)
    return bench


def test_evidence_of_a_loss_moves_nothing_before_the_probe_is_answered():
    bench = bench_of_passes()
    out = bench.send(numbers(40), budget=0.05, offered=False)
    headers = []
    for first in range(0, 40, 4):
        out.offer(first, 4)
        headers += bench.leave()
        bench.now += 1e-3
    probe = headers[-1]
    assert probe.type == Type.END
    assert not any(h.cls & wire.LAST for h in headers), (
        "the probe is no chunk: losses of chunks do not take it"
    )
    bench.now += RTT_S
    bench.feedback(*[h for h in data_of(headers) if 32 <= h.chunk < 36])
    assert out.missed.tolist() == list(range(32))
    assert not out.repairable
    assert data_of(bench.leave()) == []
    bench.feedback(probe, asked=True)
    again = [header.chunk for header in data_of(bench.leave())]
    assert again == [*range(32), *range(36, 40)], "all that is missing, once"


def test_what_a_pass_loses_waits_for_the_end_of_that_pass():
    bench = bench_of_passes()
    out = bench.send(numbers(40), budget=0.05)
    headers = bench.leave()
    assert headers[-1].type == Type.END
    bench.now += RTT_S
    bench.feedback(headers[-1], asked=True)
    first = bench.leave()
    assert [header.chunk for header in data_of(first)] == list(range(40))
    assert first[-1].type == Type.END
    bench.now += RTT_S
    came = [header for header in data_of(first) if header.chunk % 2]
    bench.feedback(*came)
    assert data_of(bench.leave()) == []
    bench.feedback(*came, first[-1], asked=True)
    assert [header.chunk for header in data_of(bench.leave())] == list(range(0, 40, 2))
    assert out.chunks_resent == 60


def test_a_pass_that_leaves_no_more_than_may_miss_is_the_last():
    bench = bench_of_passes()
    out = bench.send(numbers(40), budget=0.5)
    headers = bench.leave()
    bench.now += RTT_S
    bench.feedback(*data_of(headers)[20:], headers[-1], asked=True)
    assert len(out.missed) == 20 == out.may_miss
    assert data_of(bench.leave()) == []


def test_exact_messages_are_repaired_on_evidence():
    """The papers have a reliable connection for them."""
    bench = bench_of_passes()
    _, bursts = send_bursts(bench, 10)
    bench.now += 2 * RTT_S
    bench.feedback(*bursts[9], sent_s=bench.now - RTT_S)
    assert {header.chunk for header in data_of(bench.leave())} == set(range(36))


@pytest.mark.parametrize(("loss", "budget"), [(0.6, 0.01), (0.6, 0.4), (0.8, 0.01), (0.9, 0.4)])
def test_passes_and_chunks_are_those_of_the_closed_form(loss, budget):
    """While each pass loses q, m passes leave q^m missing, and the sender has sent (1 - q^m) / (1 - q) times the message."""
    chunks = 600
    cores = Cores(config=TransportConfig(copies=1, repair="passes"))
    rng = np.random.default_rng(1)
    probed = set()

    def lose(header, datagram, target):
        if header.type == Type.END:  # in copies, since much is lost: they leave together
            probed.add(cores.now)
        return [] if header.type == Type.DATA and rng.random() < loss else [(0.0, datagram)]

    cores.tamper = lose
    cores.begin()
    data = numbers(chunks)
    cores.receive(1, 0, data, budget=budget, stop=Stop.EAGER)
    cores.send(0, 1, data, budget=budget, stop=Stop.EAGER, offered=True)
    cores.run(until=20.0)
    sent = cores.delivered()
    assert len(sent.missing) <= budget * chunks
    expected = math.log(budget) / math.log(loss)
    assert len(probed) == pytest.approx(expected, abs=2.0)
    total = (sent.chunks_sent + sent.chunks_resent) / chunks
    assert total == pytest.approx((1 - loss**expected) / (1 - loss), rel=0.15)


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="repair='probe': known are 'evidence', 'passes'"):
        TransportConfig(repair="probe")
