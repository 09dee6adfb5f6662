"""``dblp bench compression``: small runs of all of its parts, the table's width, and what it refuses."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from dblp.cli.bench.compression_cost import codec, references, rounds
from dblp.cli.bench.compression_net import CompressedRanks
from dblp.cli.bench.compression_plan import METHODS, CompressionPlan
from dblp.cli.bench.compression_results import Figures, legend, records, table
from dblp.cli.bench.compression_training import Trained, Trainings
from dblp.cli.main import run
from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.registry import METHODS as KNOWN
from dblp.collectives.compression.registry import parse_compression
from dblp.transport.policy import Bounded, Exact


class _Small(CompressionPlan):
    """A tenth of a million elements."""

    @property
    def bucket(self) -> Bucket:
        return Bucket([Part("a", (300, 300)), Part("b", (10_000,))])


PLAN = _Small(ranks=3, rates_bps=(1e9,), methods=("topk(0.01)", "int8"))


def test_every_method_is_measured_unless_it_decides_from_the_training_or_the_network():
    decide = {"accordion", "joint", "gravac", "netsense"}
    assert {parse_compression(text).name for text in METHODS} | {"none", *decide} == set(KNOWN)


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_both_ends_are_timed(method):
    found = codec(method, PLAN)
    assert found.compress_s > 0.0 and found.decompress_s > 0.0


def test_bytes_are_those_of_the_entries_and_a_slower_link_takes_longer():
    sparse = rounds("topk(0.01)", 1e9, PLAN)
    assert sparse.payload_bytes == 1000 * 8 + 24  # entries behind two headers
    assert 2 * sparse.payload_bytes < sparse.wire_bytes < 2.3 * sparse.payload_bytes
    slow, quick = (rounds("none", rate, PLAN) for rate in (1e8, 1e9))
    for found, rate in ((slow, 1e8), (quick, 1e9)):
        assert (
            4 / 3 * 4 * PLAN.bucket.size < found.wire_bytes < 1.6 * 4 / 3 * 4 * PLAN.bucket.size
        )  # repeats included
        assert found.round_s > 8 * 4 / 3 * 4 * PLAN.bucket.size / rate
    assert slow.round_s > 5 * quick.round_s


def test_torchs_own_ways_are_timed():
    assert list(references(PLAN)) == ["torch.topk(0.001)", "torch powerSGD_hook(4)"]
    assert all(seconds > 0 for seconds in references(PLAN).values())


def _figures(plan, seeds=0):
    return [
        Figures(
            method=method,
            codec=codec(method, plan),
            rounds=[rounds(method, rate, plan) for rate in plan.rates_bps],
            trained=[
                Trained(method=method, seed=s, accuracy=0.9, perplexity=None, ratio=2.0, missing_share=0.0)
                for s in range(seeds)
            ],
        )
        for method in ("none", *plan.methods)
    ]


def test_records_have_a_line_for_each_method_and_rate():
    found = records(_figures(PLAN, seeds=2), PLAN)
    assert [record["method"] for record in found] == ["none", "topk(0.01)", "int8"]
    for record in found:
        assert {"ranks", "rate_bps", "step_s", "compress_s_per_melem"} <= set(record)
        assert record["test_accuracy"] == record["dense_accuracy"] == 0.9 and record["seeds"] == 2
        assert record["step_s"] > record["round_s"] > 0.0
    assert found[0]["ratio_wire"] == 1.0 and found[1]["ratio_wire"] > 20 and 3 < found[2]["ratio_wire"] < 4.1


def test_the_table_fits_a_terminal_of_100_columns():
    plan = _Small(
        ranks=2, rates_bps=(1e8, 1e9, 1e10), methods=("dgc(0.001,indices=delta,nesterov=true,warmup=4)",)
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(_figures(plan, seeds=1), {"torch.topk(0.001)": 0.01}, plan))
    text = console.export_text() + legend(plan)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    for heading in (
        "method",
        "ms/Melem",
        "step 100 Mb/s",
        "step 1 Gb/s",
        "step 10 Gb/s",
        "accuracy",
        "90.00%",
    ):
        assert heading in text
    assert "".join(line[:26].strip() for line in text.splitlines()).find("nesterov=true,warmup=4)") > 0


def test_a_training_with_all_sent_is_the_dense_one():
    """topk of all elements, over the network, against the workers' mean: equal but for the order of a sum."""
    trainings = Trainings(CompressionPlan(steps=3, ranks=2))
    dense, all_sent = (trainings.run(method, 0) for method in ("none", "topk(1.0)"))
    assert dense.accuracy == pytest.approx(all_sent.accuracy, abs=0.01)
    assert dense.ratio == 1.0 and 0.4 < all_sent.ratio < 0.6
    assert trainings.epoch_steps == 21


def test_a_training_over_bounded_rounds_loses_something():
    plan = CompressionPlan(steps=4, ranks=2, loss=0.2, budget=0.4)
    found = Trainings(plan).run("topk(0.1)", 1)
    assert 0.0 < found.missing_share <= 0.4


def test_ranks_hold_the_same_average():
    for policy, loss in ((Exact(), 0.0), (Bounded(0.3), 0.1)):
        net = CompressedRanks("topk(0.1)", policy, ranks=3, rate_bps=0.0, delay_s=1e-4, loss=loss, seed=1)
        gradients = np.random.default_rng(0).standard_normal((3, PLAN.bucket.size)).astype(np.float32)
        seconds, reports = net.average(gradients, PLAN.bucket)
        net.close()
        assert (gradients == gradients[0]).all() and seconds > 0 and len(reports) == 3


def test_the_command_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    options = [
        "--methods",
        "topk(0.01)",
        "--ranks",
        "2",
        "--rates",
        "1000",
        "--steps",
        "0",
        "--json",
        str(path),
    ]
    assert run(["bench", "compression", *options]) == 0
    content = json.loads(path.read_text())
    assert content["command"] == "bench compression" and len(content["records"]) == 2
    assert content["records"][1]["test_accuracy"] is None and "torch.topk(0.001)" in content["references"]
    assert "topk(0.01)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "zip"], "'zip' is no compression method"),
        (["--methods", ""], "names no method"),
        (["--methods", ";"], "names no method"),
        (["--methods", "int8(exchange=sum)", "--ranks", "200"], "don't fit a lane"),
        (["--methods", "topk(0.1); gravac(window=4)"], "python -m tests.benchmarks.gravac"),
        (["--methods", "netsense", "--budget", "0.1"], "python -m tests.benchmarks.netsense"),
        (["--methods", "accordion"], "decides while it trains"),
        (["--ranks", "1"], "--ranks 1"),
        (["--rates", "0"], "'0' is not a rate"),
        (["--rates", "fast"], "'fast' is not a rate"),
        (["--melem", "0"], "--melem 0"),
        (["--loss", "1"], "--loss 1"),
        (["--budget", "1.5"], "budget=1.5"),
        (["--steps", "-1"], "--steps -1"),
        (["--data", "text", "--model", "cnn"], "cannot read"),
    ],
)
def test_what_it_refuses(options, words, capsys):
    assert run(["bench", "compression", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
