"""Records: every figure as worked out by hand; claims that did not come true are told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dblp.sim.lab import claim
from dblp.sim.lab.counters import Counters, LinkCounters
from dblp.sim.lab.impairments import parse_schedule
from dblp.sim.lab.results import document_of, records_of
from dblp.sim.lab.run import block_of
from tests.lab.made import START, block, counted, run, span, trained

ISSUE_FIELDS = {
    "experiment", "arm", "rounds", "p50_s", "p90_s", "p99_s", "p999_s", "burst_p50_s", "offered_loss", "missing_share",
    "cpu_s_per_gb", "test_accuracy", "wall_s",
}  # fmt: skip


def test_a_record_holds_what_the_rounds_say():
    made = run(
        [
            block("gloo-cubic", [0.1, 0.3], counters=counted(990, 10), sent=90, resent=9),
            block(
                "default",
                [0.1] * 3,
                at=START + 1,
                counters=counted(400, 50, 50),
                sent=10,
                resent=1,
                missing=3,
                bounded=30,
            ),
            block("gloo-cubic", [0.2], at=START + 2, counters=counted(500, 500), sent=10, resent=1),
        ],
        impair="loss(0.1)",
    )
    gloo, bounded = records_of(made)
    assert gloo.keys() >= ISSUE_FIELDS
    assert (gloo["experiment"], gloo["arm"], gloo["rounds"], gloo["bytes"]) == (
        "made",
        "gloo-cubic",
        3,
        2**20,
    )
    assert (gloo["p50_s"], gloo["max_s"], gloo["wall_s"]) == pytest.approx((0.2, 0.3, 0.6))
    assert gloo["tail_ratio"] == pytest.approx(0.298 / 0.2)
    assert gloo["p90_s"] == pytest.approx(0.28) and gloo["p999_s"] == pytest.approx(0.2998)
    assert gloo["offered_loss"] == pytest.approx(510 / 2000) and gloo["repaired_share"] == pytest.approx(0.1)
    assert gloo["cpu_s_per_gb"] == pytest.approx(0.3 / (3 * 2 * 2**20 / 1e9))
    assert (gloo["missing_share"], gloo["burst_p50_s"], gloo["test_accuracy"]) == (0.0, None, None)
    assert (bounded["offered_loss"], bounded["queue_loss"], bounded["missing_share"]) == (0.1, 0.1, 0.1)


def test_rounds_are_told_apart_by_the_bursts_that_lay_over_them():
    """Rounds of 0.1 s from 0.0 on; a burst from 0.25 to 0.45 touches the third, fourth and fifth."""
    made = run(
        [block("default", [0.1] * 3 + [0.5, 0.1])],
        (span(0.25, 0.45),),
        impair="bursts(loss=0.8,length=200ms,every=1s)",
    )
    content = document_of(made)
    (entry,) = content["rounds"]
    assert entry["hit"] == [False, False, True, True, False]
    assert entry["start_s"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.8])
    assert content["bursts"] == [pytest.approx([0.25, 0.45])]
    (record,) = content["records"]
    assert (record["burst_rounds"], record["burst_p50_s"]) == (2, pytest.approx(0.3))
    assert record["clear_p50_s"] == pytest.approx(0.1) and record["burst_max_s"] == pytest.approx(0.5)
    json.dumps(content, allow_nan=False)


def test_a_round_is_from_its_first_start_to_its_last_end():
    events = [
        {
            "starts": [1.0, 2.0],
            "ends": [1.5, 2.1],
            "cpu_s": 0.5,
            "sent": 1,
            "resent": 2,
            "missing": 3,
            "bounded": 4,
        },
        {
            "starts": [1.1, 1.9],
            "ends": [1.4, 2.4],
            "cpu_s": 0.25,
            "sent": 10,
            "resent": 20,
            "missing": 30,
            "bounded": 40,
        },
    ]
    made = block_of("default", 4, events, counted(1))
    np.testing.assert_allclose(made.starts, [1.0, 1.9])
    np.testing.assert_allclose(made.seconds, [0.5, 0.5])
    assert (made.cpu_s, made.sent, made.resent, made.missing, made.bounded) == (0.75, 11, 22, 33, 44)


def test_ratios_are_gloos_time_over_dblps():
    """Blocks drift: the second ones are ten times as long. The paired ratio is not moved by that."""
    made = run(
        [
            block("gloo-cubic", [0.2, 0.2, 0.2]),
            block("default", [0.1, 0.1]),
            block("default", [1.0, 1.0, 1.0]),
            block("gloo-cubic", [2.0]),
        ]
    )
    (ratio,) = document_of(made)["ratios"]
    assert (ratio["arm"], ratio["than"], ratio["bytes"]) == ("default", "gloo-cubic", 2**20)
    assert (ratio["paired"], ratio["p50"]) == pytest.approx((2.0, 0.2 / 1.0))
    assert (ratio["burst_p50"], ratio["wall"]) == (None, None)


def test_training_is_a_record_an_arm():
    made = run([], train={"seeds": [0, 1]})
    made.trained += [trained("gloo-cubic", 0, 10.0, 0.9), trained("gloo-cubic", 1, 12.0, 0.8)]
    made.trained.append(
        trained(
            "default", 0, 5.0, 0.85, chunks_missing=5, chunks_expected=50, chunks_resent=10, chunks_sent=110
        )
    )
    gloo, bounded = records_of(made)
    assert (gloo["wall_s"], gloo["test_accuracy"], gloo["seeds"]) == pytest.approx((11.0, 0.85, 2))
    assert (gloo["missing_share"], gloo["repaired_share"], gloo["bytes"]) == (0.0, None, None)
    assert (bounded["missing_share"], bounded["repaired_share"]) == pytest.approx((0.1, 0.1))
    assert bounded["rounds"] == 2 and bounded["p50_s"] == pytest.approx(0.02)
    assert bounded["offered_loss"] == pytest.approx(0.1)
    (ratio,) = document_of(made)["ratios"]
    assert (ratio["wall"], ratio["paired"], ratio["p50"]) == (pytest.approx(2.2), None, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("impair", "counters", "says"),
    [
        ("loss(0.01)", counted(99_000, 1_000), ""),
        ("loss(0.01)", counted(98_850, 1_150), ""),
        ("loss(0.01)", counted(100_000, 0), "1.000% was asked for, and 0 of 100000 packets"),
        ("loss(0.01)", counted(98_000, 2_000), "2000 of 100000 packets (2.000%)"),
        ("loss(0.01)", counted(0, 0), "no packet met the loss"),
        ("", counted(100_000, 0, 500), ""),
        ("", counted(100_000, 3), "3 packets were dropped by a model where none was asked for"),
        ("loss(0.5),links(h1)", counted(100_000, 0), "no packet met the loss"),
    ],
)
def test_a_lasting_loss_must_have_happened(impair, counters, says):
    made = run([block("default", [0.1], counters=counters)], impair=impair)
    found = claim.check(parse_schedule(impair), made)
    assert says in found and bool(found) == bool(says)
    assert not found or found.startswith("default: ")


@pytest.mark.parametrize(("way", "offered"), [("down", 0.05), ("up", 0.0), ("both", 0.025)])
def test_a_loss_of_one_way_is_of_the_packets_of_that_way(way, offered):
    """nftables counts both ways of a link always; what went the other way met no loss."""
    counters = Counters(
        {"h1_down": LinkCounters(95_000, 5_000), "h1_up": LinkCounters(100_000)}, frozenset(("h1_down",))
    )
    impair = f"loss(0.05),links(h1,way={way})"
    made = run([block("default", [0.1], counters=counters)], impair=impair)
    assert records_of(made)[0]["offered_loss"] == pytest.approx(offered)
    assert (claim.check(parse_schedule(impair), made) == "") == (way == "down")


def test_drops_of_the_queue_are_no_proof_of_a_loss():
    made = run([block("default", [0.1], counters=counted(99_000, 0, 1_000))], impair="loss(0.01)")
    assert "0 of 100000" in claim.check(parse_schedule("loss(0.01)"), made)


BURSTS = "bursts(loss=0.8,length=200ms,every=1s)"


@pytest.mark.parametrize(
    ("spans", "counters", "says"),
    [
        ((span(0.0, 0.2),), counted(1000, 100), ""),
        ((), counted(1000, 100), "no burst of"),
        ((span(5.0, 5.2),), counted(1000, 0), "default: none of its rounds met a burst"),
        (
            (span(0.0, 0.2),),
            counted(1000, 0),
            "default: 67% of its time was in bursts, but no packet was dropped",
        ),
    ],
)
def test_bursts_must_have_happened(spans, counters, says):
    made = run([block("default", [0.1, 0.2], counters=counters)], spans, impair=BURSTS)
    found = claim.check(parse_schedule(BURSTS), made)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("inside", "before", "says"),
    [
        (counted(200, 800), None, ""),
        (counted(160, 840), None, ""),
        (
            counted(999, 1),
            None,
            "in the bursts: a loss of 80.000% was asked for, and 1 of 1000 packets (0.100%)",
        ),
        (counted(0, 1000), None, "in the bursts: a loss of 80.000% was asked for, and 1000 of 1000"),
        (counted(0), counted(0), ""),
        (counted(200, 800), counted(9_900, 100), ""),
        (
            counted(200, 800),
            counted(10_000, 0),
            "between the bursts: a loss of 1.000% was asked for, and 0 of",
        ),
        (
            counted(200, 800),
            counted(9_000, 1_000),
            "between the bursts: a loss of 1.000% was asked for, and 1000",
        ),
    ],
)
def test_bursts_and_what_holds_between_them_have_their_own_share(inside, before, says):
    """By what was counted while a burst held everywhere, and between two."""
    impair = f"loss(0.01),{BURSTS}" if before is not None else BURSTS
    spans = (span(0.0, 0.2, inside, before),)
    made = run([block("default", [0.1, 0.2], counters=counted(1000, 100))], spans, impair=impair)
    found = claim.check(parse_schedule(impair), made)
    assert says in found and bool(found) == bool(says)
