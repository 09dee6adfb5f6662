"""Policies and configurations refuse what is of a wrong type where it is written, and take names for members."""

# mypy: disable-error-code="arg-type"
# Wrong types are what this is about.

import enum
from dataclasses import dataclass, fields

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.transport.fields import check_fields
from dblp.transport.policy import Bounded, Carry, CarryBound, Consistency, Fill, Policy, Stop, Tags


class Fruit(enum.Enum):
    APPLE = "apple"
    PEAR = "pear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Basket:
    fruit: Fruit = Fruit.APPLE
    number: int = 1
    weight: float = 0.5
    label: str = ""
    ripe: bool = True
    owner: object = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_names_become_members_and_numbers_of_numpy_are_numbers():
    basket = Basket(fruit="pear", number=np.int64(3), weight=np.float32(0.25), owner=Basket)
    assert basket.fruit is Fruit.PEAR and basket == Basket(
        fruit=Fruit.PEAR, number=3, weight=0.25, owner=Basket
    )
    assert Basket(weight=2).weight == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"fruit": "plum"}, "fruit='plum': use one of 'apple', 'pear'"),
        ({"fruit": None}, "fruit=None: use one of"),
        ({"fruit": ["pear"]}, "use one of"),
        ({"number": 1.5}, "number=1.5: a whole number is needed"),
        ({"number": "2"}, "number='2': a whole number"),
        ({"number": True}, "number=True: a whole number"),
        ({"weight": "0.5"}, "weight='0.5': a number is needed"),
        ({"weight": None}, "weight=None: a number"),
        ({"weight": False}, "weight=False: a number"),
        ({"label": b"x"}, "a text is needed"),
        ({"ripe": 1}, "ripe=1: True or False is needed"),
    ],
)
def test_wrong_types_are_named(wrong, words):
    with pytest.raises(ConfigError) as caught:
        Basket(**wrong)
    assert words in str(caught.value)


def test_policies_take_names():
    policy = Policy(
        budget=0.1, stop="eager", tags="both", consistency="relaxed", fill="previous", critical_share=0.05
    )
    assert (policy.stop, policy.tags) == (Stop.EAGER, Tags.BOTH)
    assert (policy.consistency, policy.fill) == (Consistency.RELAXED, Fill.PREVIOUS)
    assert Carry(bound="age", limit=2) == Carry(bound=CarryBound.AGE, limit=2.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bounded("0.1"), "budget='0.1': a number is needed"),
        (lambda: Bounded(None), "budget=None"),
        (lambda: Bounded(0.1, stop="soon"), "stop='soon': use one of 'eager', 'stall'"),
        (lambda: Bounded(0.1, carry=True), "carry=True: use a dblp.Carry"),
        (lambda: Policy(budget=0.1, gather_budget="0.01"), "gather_budget='0.01'"),
        (lambda: Policy(hadamard="yes"), "hadamard='yes': True or False"),
        (lambda: Policy(resync_rounds=1.5), "resync_rounds=1.5: a whole number"),
        (lambda: Carry(bound="old"), "bound='old': use one of"),
        (lambda: Carry(bound=CarryBound.AGE, limit=float("inf")), "limit=inf"),
        (lambda: TransportConfig(paths="8"), "paths='8': a whole number"),
        (lambda: TransportConfig(timeout_s="30"), "timeout_s='30': a number"),
        (lambda: TransportConfig(congestion=None), "congestion=None: a text"),
        (lambda: TransportConfig(seed=-1), "seed=-1: must not be negative"),
        (lambda: TransportConfig(rate_bps=-1.0), "rate_bps=-1.0: must not be negative"),
    ],
)
def test_what_users_write_wrong_is_refused_where_they_write_it(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", [Policy, Carry, TransportConfig])
def test_every_field_of_a_default_is_checked(kind):
    """But for those whose default is None, which are checked by themselves."""
    for spec in fields(kind):
        if spec.default is not None:
            with pytest.raises(ConfigError, match=spec.name):
                kind(**{spec.name: object()})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("stop", [Stop.STALL, Stop.DEADLINE])
def test_a_time_to_stop_after_is_one(stop, seconds):
    with pytest.raises(ConfigError, match=f"stop_after_s={seconds}"):
        Policy(budget=0.1, stop=stop, stop_after_s=seconds)
