"""``attach`` with a budget controller in real processes, and the plain form of policies."""

import json

import pytest

from dblp.collectives.torch.plain import differences, plain_policy, policy_from_plain
from dblp.errors import ConfigError
from dblp.transport.policy import Bounded, Carry, CarryBound, Fill, Policy, Tags


@pytest.mark.processes
@pytest.mark.sockets
@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("phases", 2),
        ("resumed", 2),
        ("overruled", 2),
        ("uneven", 2),
        ("drifting", 2),
        ("layouts", 2),
        ("tagged", 2),
        ("misused", 2),
    ],
)
def test_attached(ranks, scenario, world_size):
    ranks(scenario, world_size)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Bounded(0.3, stop="deadline", stop_after_s=0.5, consistency="relaxed"),
        Policy(budget=0.2, gather_budget=0.01, tags=Tags.BOTH, critical_share=0.05, fill=Fill.RESCALE),
        Bounded(0.1, carry=Carry(bound=CarryBound.AGE, limit=2.0, momentum=0.9, masking=True)),
    ],
)
def test_policies_in_plain_values(policy):
    values = json.loads(json.dumps(plain_policy(policy)))
    assert policy_from_plain(values) == policy


def test_differences_name_what_is_not_the_same():
    one, other = Bounded(0.1), Bounded(0.3, stop="eager", carry=None)
    assert differences(one, other) == (
        "budget=0.1, stop='stall', carry={'bound': 'decay', 'limit': 1.0, 'momentum': 0.0, 'masking': False}",
        "budget=0.3, stop='eager', carry=None",
    )
    assert differences(one, one) == ("", "")
    assert differences(Bounded(1.0 - 0.3**2), one)[0] == "budget=0.91"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budget": 2.0}, "budget=2.0"),
        ({"budget": "much"}, "much"),
        ({"stop": "never"}, "never"),
        ({"odd": 1}, "no odd"),
        ({"carry": {"bound": "no"}}, "no"),
        ({"carry": 3}, "make no policy"),
        (None, "make no policy"),
    ],
)
def test_values_that_make_no_policy(values, words):
    with pytest.raises(ConfigError, match=words):
        policy_from_plain(values)
