"""Accordion: what is sent in each phase, by parameter."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.collectives.compression.accordion import Accordion
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.compression.rounds import Compression
from dblp.collectives.phases import LearningRateChange, Needs, Phase, Phases
from dblp.errors import ConfigError
from tests.collectives.compression.cases import bucket, gradient, job
from tests.collectives.worlds import run_memory

PARTS = bucket([(40, 30), (50,), (20, 20)])
FIRST_ONLY = Phases(Phase.TOLERANT, {"p0": Phase.CRITICAL})


@pytest.mark.parametrize(
    ("phases", "shares"),
    [
        (Phases(Phase.CRITICAL), (1, 1, 1)),
        (Phases(Phase.TOLERANT), (0.1, 0.1, 0.1)),
        (FIRST_ONLY, (1, 0.1, 0.1)),
    ],
)
def test_each_parameter_sends_by_its_own_phase(phases, shares):
    array, method = gradient(PARTS.size, "float32"), Accordion()
    work = job(PARTS, array, "float32", phases=phases)
    method.begin(work, array)
    own = method.own_part(work, method.compress(work))
    for part, share in zip(PARTS.cut(own), shares, strict=True):
        assert np.count_nonzero(part) == share * part.size
    np.testing.assert_array_equal(own + work.values, array)


def test_phases_change_between_rounds():
    """What a tolerant round withheld leaves with the next critical one: nothing is lost on the way."""

    async def member(group):
        compression, total, delivered = Compression(Accordion()), np.zeros(PARTS.size), np.zeros(PARTS.size)
        for step, phases in enumerate([Phases(Phase.TOLERANT), FIRST_ONLY, Phases(Phase.CRITICAL)]):
            array = np.random.default_rng([group.rank, step]).integers(-8, 9, PARTS.size).astype(np.float32)
            total += array
            await compression.all_reduce(group, array, PARTS, timeout_s=10.0, phases=phases)
            delivered += array
        return total, delivered

    (mine, got), (theirs, also) = run_memory(member, 2)
    np.testing.assert_array_equal(got, also)
    np.testing.assert_array_equal(mine + theirs, 2 * got)


def test_its_controller():
    plain = parse_compression("accordion(eta=0.3,epochs=5)")
    assert isinstance(plain, Accordion)
    controller = plain.controller(learning_rate=False)
    assert (
        controller.detector.needs & Needs.LAYER_NORMS and not controller.detector.needs & Needs.LEARNING_RATE
    )
    assert controller.interval.epochs == 5 and controller.phases.model is Phase.CRITICAL
    assert plain.controller(learning_rate=True).detector.needs & LearningRateChange.needs
    for text in ("accordion(eta=0)", "accordion(epochs=0)", "accordion(tolerant=0)"):
        with pytest.raises(ConfigError):
            parse_compression(text)
