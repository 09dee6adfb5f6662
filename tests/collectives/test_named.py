"""Policies by name: one name is taken everywhere, and docs/policies.md says where."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dblp.cli.bench import burst, command
from dblp.cli.main import run
from dblp.cli.train.policies import known_arms, parse_compressions, policy_of
from dblp.collectives.named import OTHER_NAMES, parse_policy, plain_name
from dblp.collectives.presets import preset, presets
from dblp.errors import ConfigError
from dblp.sim.lab.arms import parse_arm
from dblp.transport.policy import Bounded, Consistency, Stop

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.mark.parametrize("name", presets())
def test_a_preset_by_name(name):
    assert parse_policy(name) == preset(name) or preset(name).controller is not None
    assert parse_policy(name).policy == preset(name).policy


@pytest.mark.parametrize("other", OTHER_NAMES)
def test_other_names_are_the_same_policy_everywhere(other):
    settings = "(budget=0.1)" if plain_name(other) == "bounded" else ""
    one, two = parse_policy(other + settings), parse_policy(plain_name(other) + settings)
    assert one == two
    assert parse_arm(other + settings).preset == parse_arm(plain_name(other) + settings).preset == one
    assert policy_of(other, 0.1, "stall") == policy_of(f"topk(0.1) over {other}", 0.1, "stall")
    assert parse_compressions(f"topk(0.1) over {other}") == [f"topk(0.1) over {other}"]


def test_settings_in_brackets():
    assert parse_policy("default(leg=40%)").policy == preset("default", leg=0.4).policy
    assert parse_policy("bounded(budget=0.1)").policy == Bounded(0.1)
    full = parse_policy("bounded(budget=0.2, stop=deadline, stop_after_s=0.5, consistency=exact)").policy
    assert full == Bounded(0.2, stop=Stop.DEADLINE, stop_after_s=0.5, consistency=Consistency.EXACT)
    assert parse_policy("dblp(phase=tolerant)").policy == preset("dblp").tolerant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "policy, column 1: expected the name of a policy"),
        ("deflaut", "column 1: 'deflaut' is none: known are bounded, exact, mlt.*did you mean 'default'"),
        ("bounded", "bounded lacks budget"),
        ("gloo", "'gloo' is none"),
    ],
)
def test_what_is_no_policy(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_policy(text)


def test_a_preset_that_is_nearly_spelt_right_is_offered():
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        preset("defualt")


class _Ready(Exception):
    """The command has read its options."""


def _accepts(monkeypatch, arguments):
    """Whether a command takes these options: it is stopped before its work."""

    def ready(*_):
        raise _Ready

    monkeypatch.setattr("dblp.cli.train.command._train", ready)
    monkeypatch.setattr(command, "_bench", ready)
    monkeypatch.setattr(burst, "_bench", ready)
    monkeypatch.setattr("dblp.cli.lab.command._run", ready)
    with contextlib.suppress(_Ready):
        assert run(arguments) == 2, "it would have come to its work"
        return False
    return True


PLACES = {
    "`dblp.attach`": None,
    "`dblp train --arms`": ["train", "--arms"],
    "`dblp train --policy`": ["train", "--policy"],
    "`dblp bench allreduce --arms`": ["bench", "allreduce", "--policy-budget", "0.1", "--arms"],
    "`dblp bench burst --arms`": ["bench", "burst", "--arms"],
    "`dblp lab run --arms`": ["lab", "run", "clean", "--arms"],
}


def test_the_page_says_which_name_is_taken_where(monkeypatch):
    """Each cell of its table is tried."""
    _, _, part = PAGE.read_text().partition("## Names")
    lines = [line for line in part.partition("\n## ")[0].splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert heads[1:] == list(PLACES)
    tried = 0
    for names, *cells in rows:
        for name in (part.strip(" `") for part in names.split(",  ")):
            for arguments, cell in zip(PLACES.values(), cells, strict=True):
                taken = _is_policy(name) if arguments is None else _accepts(monkeypatch, [*arguments, name])
                assert taken is (cell == "yes"), (name, arguments, cell)
                tried += 1
    assert tried >= 6 * (len(presets()) + 4)
    assert set(known_arms()) <= {part.strip(" `") for names, *_ in rows for part in names.split(",  ")}


def _is_policy(name):
    try:
        return bool(parse_policy(name))
    except ConfigError:
        return False
