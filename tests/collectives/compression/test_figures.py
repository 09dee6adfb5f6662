"""The benchmarks behind docs/compression.md."""

from __future__ import annotations

import asyncio
from math import prod

import numpy as np
import pytest

from dblp.cli.train.data import load
from dblp.cli.train.samples import Samples
from dblp.collectives.compression.base import Bucket, Part
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.errors import UnsupportedError
from dblp.sim.loop import run as run_virtual
from dblp.transport.policy import Bounded
from tests.benchmarks import compressed_accuracy, compression, dgc_causes, gravac, netsense
from tests.benchmarks.compressed_workers import CompressedWorkers, Star
from tests.benchmarks.ideal_network import HEADERS, IdealNetwork
from tests.collectives.worlds import run_memory


def test_resnet50_has_its_number_of_parameters():
    shapes = compression.resnet50()
    assert sum(map(prod, shapes)) == 25_557_032
    assert sum(prod(shape) for shape in shapes if len(shape) == 1) == 54_120


def test_ways_select_as_many():
    first, *others = compression.selection(200_000, repeats=1)
    assert first["way"] == "torch.topk" and first["ratio"] == 1.0 and first["selected"] == 200
    assert {record["way"] for record in others} == {"sampled threshold", "exact"}


def test_sizes_are_those_of_the_entries():
    """100 entries of 8 bytes behind two headers, sent to three peers in one chunk each."""
    record = compression._compressed("topk(0.001)", Bucket([Part("a", (1000, 100))]), 4)
    assert record["payload_bytes"] == 100 * 8 + 24 and record["ratio"] == 400_000 / 824
    assert 3 * 824 < record["wire_bytes"] < 3 * 950


def test_the_ideal_network_gives_real_averages_in_the_time_of_its_formula():
    """A thousand elements over four ranks of 1 Mb/s, 10 ms: an all-gather of 100 entries, and the figures of none."""
    parts = Bucket([Part("a", (1000,))])

    def gradient(rank):
        return np.random.default_rng(rank).standard_normal(1000).astype(np.float32)

    async def ideal():
        network, loop = IdealNetwork(4, 1e6, 0.01), asyncio.get_running_loop()
        groups = network.groups
        arrays, began = [gradient(rank) for rank in range(4)], loop.time()
        for _ in range(2):
            await asyncio.gather(
                *(
                    Compression(parse_compression("topk(0.1)")).all_reduce(group, array, parts, timeout_s=9.0)
                    for group, array in zip(groups, arrays, strict=True)
                )
            )
        return arrays[0], loop.time() - began

    async def member(group):
        array = gradient(group.rank)
        for _ in range(2):
            await Compression(parse_compression("topk(0.1)")).all_reduce(group, array, parts, timeout_s=9.0)
        return array

    average, took = run_virtual(ideal())
    np.testing.assert_array_equal(average, run_memory(member, 4)[0])
    assert took == pytest.approx(2 * (0.01 + 8 * HEADERS * 3 * (100 * 8 + 24) / 1e6))


def test_only_dblps_own_groups_lose():
    """The stand-in has no bounded rounds: refused before anything is kept or sent."""
    parts = Bucket([Part("a", (1000,))])

    async def lossy():
        group = IdealNetwork(2, 1e6, 0.01).groups[0]
        compression_ = Compression(parse_compression("topk(0.1)"))
        with pytest.raises(
            UnsupportedError, match="'topk': only dblp's own groups have rounds that may lose"
        ):
            await compression_.all_reduce(
                group, np.ones(1000, np.float32), parts, timeout_s=9.0, policy=Bounded(0.1)
            )

    run_virtual(lossy())


@pytest.mark.parametrize("method", ["accordion", "netsense", "gravac(window=1)"])
@pytest.mark.parametrize("ideal", [True, False])
def test_workers_that_compress(method, ideal):
    """Both networks give all ranks the same average, and take virtual time."""
    parts = Bucket([Part("a", (30, 20)), Part("b", (20,))])
    star = Star(rate_bps=1e6, ideal=ideal, background=0.0 if ideal else 0.3)
    workers = CompressedWorkers(method, star, parts, ranks=3, compute_s=1e-3, epoch_steps=2, seed=1)
    for step in range(5):
        gradients = np.random.default_rng(step).standard_normal((3, 620)).astype(np.float32)
        average = workers.all_reduce(gradients)
        np.testing.assert_array_equal(gradients, np.tile(average, (3, 1)))
    if ideal:  # background goes on at its own rate
        workers.set_star(Star(rate_bps=2e4, ideal=True))
        workers.all_reduce(np.ones((3, 620), np.float32))
        before, after = np.diff(workers.ended_s)[-2:]
        assert after > 1.5 * before
    workers.close()


@pytest.mark.parametrize("scope", ["parameter", "bucket"])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_dgc_written_a_second_time_is_the_same(masking, momentum, scope):
    """Averages of both, over a warm-up and what follows, where a sampled threshold is exact: parameters are small."""
    shapes, steps = {"a": (40, 30), "b": (30,), "c": (20, 10)}, 12
    parts = Bucket([Part(name, shape) for name, shape in shapes.items()])
    method = f"dgc(0.02,nesterov=true,momentum={momentum},masking={masking},warmup=4,scope={scope})"
    workers = CompressedWorkers(
        method, Star(rate_bps=1e9, ideal=True), parts, ranks=4, compute_s=0.0, epoch_steps=1, seed=1
    )
    variant = dgc_causes.Variant(
        label="", ratio=0.02, masking=masking, momentum=momentum, warmup=4 / steps, together=scope == "bucket"
    )
    second = dgc_causes.Workers(variant, list(shapes), list(shapes.values()), steps)
    for step in range(steps):
        gradients = np.random.default_rng(step).standard_normal((4, 1430)).astype(np.float32)
        wanted = second.all_reduce(gradients.copy())
        np.testing.assert_allclose(workers.all_reduce(gradients), wanted, rtol=1e-5, atol=1e-5)
    assert 0 < second.times.mean() < 2, "of 8 steps after the warm-up"
    workers.close()


def test_dgc_s_variants():
    """What is sent whole or chosen from the whole model, and the table."""
    shapes = {"_characters.weight": (40, 30), "b": (30,), "_layers.weight": (20, 10)}
    gradients = np.random.default_rng(0).standard_normal((4, 1430)).astype(np.float32)
    gradients[:, 1230:] *= 100.0

    def average(**more):
        variant = dgc_causes.Variant(label="", ratio=0.02, warmup=0.0, **more)
        return dgc_causes.Workers(variant, list(shapes), list(shapes.values()), 10).all_reduce(
            gradients.copy()
        )

    assert 24 < np.count_nonzero(average()[:1200]) <= 4 * 24
    assert not average(together=True)[:1200].any() and average(together=True)[1230:].any()
    np.testing.assert_allclose(
        average(whole=("_characters",))[:1230], 1.9 * gradients.mean(0)[:1230], rtol=1e-4
    )
    assert np.abs(average(clip=0.1)).max() < 0.1
    np.testing.assert_allclose(average(compressed=False), gradients.mean(0), rtol=1e-4)
    dense = {"label": "none", "compressed": False, "perplexity": 8.0} | dict.fromkeys(
        ("times_mean", "times_median", "never_share")
    )
    sparse = dense | {
        "compressed": True,
        "perplexity": 9.0,
        "times_mean": 4.0,
        "times_median": 1.0,
        "never_share": 0.5,
    }
    shown = dgc_causes.table([dense, sparse])
    assert list(shown.columns[2].cells) == ["+0.0%", "+12.5%"] and list(shown.columns[5].cells) == [
        "",
        "50.0%",
    ]


def test_the_last_step_s_ratio_has_no_warm_up_in_it():
    wanted = {
        "data": "digits", "model": "mlp", "optimizer": "sgd", "lr": 0.1, "batch": 64, "steps": 4, "epoch_steps": 1,
        "method": "dgc(0.01,warmup=3,schedule=0.5/0.5/0.5)", "seed": 0, "loss": 0.0, "budget": 0.0,
    }  # fmt: skip
    record = compressed_accuracy.experiment(wanted, Samples(load("digits", None)), 2)
    assert record["ratio_size"] < 1.5 and 30 < record["ratio_last"] < 50
    assert record["tested_at"] == [2, 4] and len(record["accuracies"]) == 2


def test_scores_are_compared_with_the_best_dense_training():
    """Of its rates, for each seed; by perplexity, where there is one, less is better."""
    perplexity = {"none": (8.0, 6.0, 6.4), "dgc": (9.0, 6.3, 6.51)}
    found = [
        {"method": method, "lr": lr, "seed": seed, "loss": 0.0, "ratio_size": 1.0, "test_accuracy": 0.5}
        | {"test_perplexity": score}
        for method, scores in perplexity.items()
        for (lr, seed), score in zip([(0.2, 0), (0.1, 0), (0.1, 1)], scores, strict=True)
    ]
    shown = compressed_accuracy.table(found)
    assert list(shown.columns[1].cells) == ["0.2", "0.1", "0.2", "0.1"]
    assert list(shown.columns[5].cells) == ["+33.33%", "+0.00%", "+50.00%", "+3.31%"]
    images = [
        record | {"test_perplexity": None, "test_accuracy": 0.1 * float(str(record["lr"]))}
        for record in found
    ]
    assert list(compressed_accuracy.table(images).columns[5].cells)[-1] == "-0.50 points"
    assert list(compressed_accuracy.table(images[:2]).columns[5].cells) == ["+0.00 points", "-1.00 points"]


def test_speed_ups_and_tables():
    def record(method, seconds):
        return {
            "model": "cnn", "method": method, "to_target_s": seconds, "test_accuracy": 0.9, "ratio": 2.0,
            "total_s": 9.0, "search_share": 0.04, "theta": 40.0,
        }  # fmt: skip

    times = {
        "topk(0.1)": 6.0,
        "topk(0.01)": 3.0,
        "topk(0.001)": 12.0,
        "accordion": 10.0,
        "gravac": 2.0,
        "none": 20.0,
    }
    found = [record(method, seconds) for method, seconds in times.items()]
    assert gravac.speed_ups(found, "cnn") == {
        "best static": 1.5, "worst static": 6.0, "accordion": 5.0, "dense": 10.0
    }  # fmt: skip
    assert gravac.table(found, "cnn").row_count == len(times)
    without = [made for made in found if not made["method"].startswith("topk")]
    assert gravac.speed_ups(without, "cnn") == {"accordion": 5.0, "dense": 10.0}, "no static arm was trained"
    other = [*without, record("randomk(0.1)", 8.0)]
    assert (
        gravac.speed_ups(other, "cnn")["best static"] == gravac.speed_ups(other, "cnn")["worst static"] == 4.0
    )
    assert gravac.speed_ups(found[4:5], "cnn") == {}
    measured = [
        {"method": method, "rate_mbps": 200.0, "background": 0.0, "samples_per_s": 100.0 * (index + 1)}
        for index, method in enumerate(netsense.METHODS)
    ]
    shown = netsense.throughput_table(measured)
    assert list(shown.columns[-1].cells) == ["1.25"] and shown.row_count == 1
    score = [{"method": "none", "seed": 0, "test_accuracy": 0.9, "ratio_size": 1.0}]
    assert (
        netsense.accuracy_table([*score, {**score[0], "method": "netsense", "test_accuracy": 0.89}]).row_count
        == 2
    )
