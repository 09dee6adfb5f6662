"""The benchmark behind docs/compression.md."""

from __future__ import annotations

from math import prod

from dblp.collectives.compression.base import Bucket, Part
from tests.benchmarks import compression


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
