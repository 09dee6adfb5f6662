"""Tags on real gradients: a tenth of the chunks, dropped by a switch that drops low classes first, holds little energy."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.transport.policy import Tags
from tests.benchmarks.tags import BUDGET, Gradient, congested_round, gradients, lossy_round, table


@pytest.fixture(scope="module")
def gradient() -> Gradient:
    """Of the CNN on digits, after some steps."""
    return gradients("cnn", "digits", [6])[0]


def test_the_gradients_are_those_of_four_workers(gradient):
    assert gradient.rows.shape == (4, sum(gradient.layers.sizes)) and gradient.step == 6
    assert len({row.tobytes() for row in gradient.rows}) == 4
    assert gradient.layers.layer_count == 4 and gradient.layers.names[-1] == "8.bias"
    assert gradient.layers.layer_of(np.array([0, 287, 320, gradient.rows.shape[1] - 1])).tolist() == [
        0,
        0,
        1,
        3,
    ]


def test_a_tenth_of_the_chunks_holds_two_percent_of_the_energy_at_most(gradient):
    record = lossy_round(gradient, Tags.MAGNITUDE, 0.1)
    assert 0.08 <= record["missing_share"] <= 0.12
    assert 0.0 < record["energy_lost"] <= 0.02
    assert record["missing_by_class"][:3] == [0, 0, 0], "the switch drops the last class first"


def test_by_chance_it_holds_several_times_as_much(gradient):
    record = lossy_round(gradient, Tags.RANDOM, 0.1)
    assert 0.08 <= record["missing_share"] <= 0.12
    assert record["energy_lost"] >= 0.04


def test_the_bound_is_not_what_saves(gradient):
    """A buffer that loses much loses more than the last class, never a critical chunk, and stays below the bound."""
    record = congested_round(gradient, Tags.MAGNITUDE, 48 * 1024)
    assert record["missing_by_class"][0] == 0 < record["missing_by_class"][2]
    assert 0.2 < record["missing_share"] < BUDGET
    assert table([record]).row_count == 1
