"""Choices of paths by themselves: which path a burst takes, told what is usable and what was acknowledged."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import gcd
from typing import Any

import numpy as np
import pytest

from dblp.errors import ConfigError
from dblp.transport.burst import burst_chunks
from dblp.transport.config import TransportConfig
from dblp.transport.message import MessageSpec
from dblp.transport.outgoing import Outgoing
from dblp.transport.paths import REGISTRY, EtherealChoice, Leaf, PathChoice, PathChoices
from dblp.transport.paths.base import ANY_CHUNKS
from dblp.transport.paths.ethereal import parts_of_flows, path_loads, spread
from dblp.transport.paths.reps import EXPLORE_TURNS, FREEZE_S, SLOTS, RepsChoice
from dblp.transport.paths.single import SingleChoice
from dblp.transport.paths.spray import RandomChoice, SprayChoice

CHUNK = 1408
UP_TO_64 = [(flows, paths) for flows in range(1, 65) for paths in range(1, 65)]


def message(chunks: int, number: int = 0) -> Outgoing:
    data = np.zeros(chunks * CHUNK, np.uint8)
    spec = MessageSpec(nbytes=len(data), chunk_bytes=CHUNK)
    out = Outgoing(number, spec, data, bytearray(48), burst_chunks(CHUNK))
    out.limit = chunks
    out.offer(0, chunks)
    return out


def picks(choice: PathChoice, times: int, usable: Any = lambda path: True, now: float = 0.0) -> list[int]:
    """So many picks in a row; all must find a path."""
    taken = []
    out = message(1)
    for _ in range(times):
        picked = choice.pick(out, usable, now)
        assert picked is not None
        taken.append(picked[0])
    return taken


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- by name


def test_every_choice_has_a_name_and_keeps_to_its_paths():
    assert set(REGISTRY) == {"spray", "random", "reps", "ethereal", "single"}
    for name in REGISTRY:
        choice = PathChoices(TransportConfig(paths=6, path_choice=name, path_chunks=3), 0, rng()).to(1)
        out = message(20)
        choice.on_started(out)
        path, most = choice.pick(out, lambda path: True, 0.0)  # type: ignore[misc]
        assert path in choice.paths and set(choice.paths) <= set(range(6))
        assert most == (ANY_CHUNKS if name == "single" else 3)


def test_the_share_of_a_path():
    spray = PathChoices(TransportConfig(paths=6), 0, rng()).to(1)
    # Bursts of 50: one of 20 or 50, two or four alike, then whatever fits into a train.
    for chunks, share in (
        (0, ANY_CHUNKS),
        (6, 8),
        (120, 20),
        (300, 50),
        (360, 30),
        (1200, 50),
        (60_000, 10_000),
    ):
        out = message(chunks)
        out.per_burst = 50
        assert spray.share_of(out, 6) == share
        assert spray.share_of(out, 1) == ANY_CHUNKS
    asked = PathChoices(TransportConfig(paths=6, path_chunks=3), 0, rng()).to(1)
    assert asked.share_of(message(60_000), 6) == 3


def test_wrong_settings_say_what_there_is():
    with pytest.raises(ConfigError, match=r"path_choice='ecmp': known are 'spray', 'random', 'reps'"):
        TransportConfig(path_choice="ecmp")
    wrongs: list[dict[str, Any]] = [{"path_chunks": -1}, {"leaf_ranks": 0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="path_chunks must not be negative, leaf_ranks at least 1"):
            TransportConfig(**wrong)
    config = TransportConfig.from_env(
        {"DBLP_PATH_CHOICE": "reps", "DBLP_PATH_CHUNKS": "4", "DBLP_LEAF_RANKS": "8"}
    )
    assert (config.path_choice, config.path_chunks, config.leaf_ranks) == ("reps", 4, 8)


# --- single, spray, random


def test_single_takes_one_path_a_pair_the_same_both_ways_and_peers_share_them_evenly():
    for rank in range(9):
        used = Counter(SingleChoice(4, rank, peer).paths for peer in range(9) if peer != rank)
        assert len(used) == 4 and max(used.values()) <= 3  # eight peers over four paths
        for peer in range(9):
            assert SingleChoice(4, rank, peer).paths == SingleChoice(4, peer, rank).paths
    choice = SingleChoice(4, 0, 1)
    assert choice.pick(message(1), lambda path: path != 1, 0.0) is None
    assert set(picks(choice, 10)) == {1}


def test_spray_takes_turns_and_passes_over_what_has_no_room():
    assert picks(SprayChoice(4), 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert picks(SprayChoice(4, first=2), 3) == [2, 3, 0]
    assert picks(SprayChoice(4), 6, lambda path: path != 1) == [0, 2, 3, 0, 2, 3]
    assert SprayChoice(4).pick(message(1), lambda path: False, 0.0) is None


def test_random_draws_evenly_among_the_usable_and_replays_from_its_seed():
    taken = Counter(picks(RandomChoice(8, rng()), 8000, lambda path: path != 5))
    assert set(taken) == set(range(8)) - {5}
    assert all(abs(count - 8000 / 7) < 5 * np.sqrt(8000 / 7) for count in taken.values())
    assert picks(RandomChoice(8, rng(3)), 50) == picks(RandomChoice(8, rng(3)), 50)
    assert RandomChoice(8, rng()).pick(message(1), lambda path: False, 0.0) is None


# --- reps


def explored(paths: int = 8, seed: int = 0, most_chunks: int = 16) -> RepsChoice:
    """A choice whose first window is over."""
    choice = RepsChoice(paths, rng(seed), most_chunks)
    picks(choice, EXPLORE_TURNS * paths)
    return choice


def test_reps_begins_at_random_whatever_has_been_acknowledged():
    choice = RepsChoice(8, rng(), 16)
    taken = []
    for _ in range(EXPLORE_TURNS * 8):
        choice.on_acked(3, 16, marked=False, now=0.0)
        taken += picks(choice, 1)
    assert len(set(taken)) >= 5
    assert picks(choice, SLOTS) == [3] * SLOTS


def test_reps_uses_the_oldest_acknowledged_path_again_and_each_once():
    choice = explored()
    for path in (5, 2, 7):
        choice.on_acked(path, 16, marked=False, now=0.0)
    assert picks(choice, 3) == [5, 2, 7]
    # Nothing is fresh now: random, so in 60 picks every path comes.
    assert set(picks(choice, 60)) == set(range(8))


def test_reps_keeps_the_last_eight():
    choice = explored()
    for path in (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 6):
        choice.on_acked(path, 16, marked=False, now=0.0)
    assert picks(choice, SLOTS) == [3, 4, 5, 6, 7, 0, 1, 6]


def test_reps_recommends_no_marked_or_partial_bursts_and_no_path_more_often_than_its_share():
    choice = explored()
    choice.on_acked(1, 16, marked=True, now=0.0)
    choice.on_acked(2, 0, marked=False, now=0.0)
    choice.on_acked(4, 5, marked=False, now=0.0)
    choice.on_acked(6, 700, marked=False, now=0.0)
    assert picks(choice, 2) == [4, 6]
    assert set(picks(choice, 60)) == set(range(8))
    few = explored(paths=3)
    few.on_acked(1, 700, marked=False, now=0.0)
    assert picks(few, 2) == [1, 1]
    assert set(picks(few, 20)) == {0, 1, 2}


def test_a_fresh_path_without_room_stays_fresh():
    choice = explored()
    for path in (5, 2):
        choice.on_acked(path, 16, marked=False, now=0.0)
    assert picks(choice, 1, lambda path: path != 5) == [2]
    assert picks(choice, 1) == [5]


def test_after_a_failure_reps_replays_what_was_good_and_then_explores():
    choice = explored()
    for path in (5, 2, 7):
        choice.on_acked(path, 16, marked=False, now=0.0)
    assert picks(choice, 3) == [5, 2, 7]  # none is fresh any more
    choice.on_left(2, now=1.0)
    assert choice.frozen
    alive = lambda path: path != 2  # noqa: E731
    assert picks(choice, 6, alive, 1.0 + FREEZE_S / 2) == [5, 7] * 3
    after = picks(choice, EXPLORE_TURNS * 8, alive, 1.0 + FREEZE_S)
    assert not choice.frozen and len(set(after)) >= 5 and 2 not in after


@pytest.mark.parametrize("name", ["spray", "random", "reps"])
def test_a_dead_paths_load_spreads_over_all_that_are_left(name):
    """Not onto the next one: 7 of 8 paths, 7,000 bursts, no path far from a seventh; REPS after its freeze."""
    choice = PathChoices(TransportConfig(paths=8, path_choice=name), 0, rng()).to(1)
    choice.on_left(2, now=0.0)
    taken = Counter(picks(choice, 7000, lambda path: path != 2, 1.0))
    assert set(taken) == set(range(8)) - {2}
    assert max(taken.values()) < 1000 * (1.001 if name == "spray" else 1.12)  # four standard deviations of 29


def test_reps_freezes_nothing_before_anything_was_acknowledged():
    choice = RepsChoice(8, rng())
    choice.on_left(0, now=0.0)
    assert not choice.frozen


def test_reps_passes_over_a_path_that_loses_more_than_the_others_but_tries_it_now_and_then():
    choice = explored()
    losses = dict.fromkeys(range(8), 0.01) | {3: 0.2}
    choice.loss_share = losses.__getitem__
    assert choice.lossy() == {3}
    choice.on_acked(3, 160, marked=False, now=0.0)
    taken = Counter(picks(choice, 2000))
    assert 0 < taken[3] < 2000 / 60
    # While the good ones are full it waits for them.
    full = [choice.pick(message(1), lambda path: path == 3, 0.0) for _ in range(2000)]
    assert sum(picked is not None for picked in full) <= 1
    losses[3] = 0.0
    assert choice.lossy() == set() and Counter(picks(choice, 2000))[3] > 2000 / 12


def test_where_all_paths_lose_alike_reps_passes_over_none():
    choice = explored()
    choice.loss_share = lambda path: 0.2 + 0.01 * path
    assert choice.lossy() == set()
    choice.loss_share = lambda path: 0.04 * (path == 2)  # little is no reason either
    assert choice.lossy() == set()


# --- ethereal


@pytest.mark.parametrize("paths", range(1, 65))
def test_the_rule_loads_every_path_exactly_as_spraying_does(paths):
    for flows in range(1, 65):
        parts = parts_of_flows(flows, paths)
        assert len(parts) == flows
        loads = path_loads(spread(parts, paths, flows), paths)
        assert loads == [Fraction(flows, paths)] * paths


def test_the_rule_splits_as_few_flows_as_it_says():
    for flows, paths in UP_TO_64:
        parts, rest = parts_of_flows(flows, paths), flows % paths
        assert parts[: flows - rest] == [1] * (flows - rest)
        pieces = paths // gcd(rest, paths) if rest else 1
        assert parts[flows - rest :] == [pieces] * rest
        assert sum(parts) - flows == (rest * (pieces - 1))


def drained(flows: int, paths: int, chunks: int, leaf: Leaf | None = None) -> list[Counter[int]]:
    """Chunks by path of each of so many messages that begin together, sent a burst at a time in turn."""
    choice = EtherealChoice(leaf or Leaf(paths, 0), paths, 7)
    messages = [message(chunks, number) for number in range(flows)]
    for out in messages:
        choice.on_started(out)
    sent = [Counter[int]() for _ in messages]
    busy = True
    while busy:
        busy = False
        for out, by_path in zip(messages, sent, strict=True):
            if out.all_sent:
                continue
            path, most = choice.pick(out, lambda path: True, 0.0)  # type: ignore[misc]
            by_path[path] += out.take_run(most)[1]
            busy = True
    return sent


@pytest.mark.parametrize(
    ("flows", "paths"), [(1, 8), (3, 8), (8, 8), (13, 8), (4, 6), (5, 6), (7, 3), (2, 64), (1, 1)]
)
def test_messages_go_by_the_rule_to_the_chunk(flows, paths):
    chunks = 4 * paths
    sent = drained(flows, paths, chunks)
    assert sum(sent, Counter()) == Counter(dict.fromkeys(range(paths), Fraction(flows * chunks, paths)))
    assert [len(by_path) for by_path in sent] == parts_of_flows(flows, paths)


def test_parts_differ_by_a_chunk_at_most_and_small_messages_are_not_split():
    (by_path,) = drained(1, 8, 101)
    assert sorted(by_path.values()) == [12] * 3 + [13] * 5
    (by_path,) = drained(1, 8, 5)
    assert list(by_path.values()) == [5]


def test_the_next_batch_goes_on_where_the_last_stopped():
    leaf = Leaf(4, 1)
    first = drained(4, 4, 4, leaf)
    assert [list(by_path) for by_path in first] == [[1], [2], [3], [0]]
    singles = [list(drained(1, 4, 3, leaf)[0]) for _ in range(5)]  # too small to split: whole, in turn
    assert singles == [[1], [2], [3], [0], [1]]


def test_a_part_whose_path_is_full_lets_the_others_go_on_and_waits_for_its_own():
    leaf = Leaf(4, 0)
    choice = EtherealChoice(leaf, 4)
    out = message(40)
    choice.on_started(out)
    taken: Counter[int] = Counter()
    while (picked := choice.pick(out, lambda path: path != 2, 0.0)) is not None:
        taken[picked[0]] += out.take_run(picked[1])[1]
    assert taken == {0: 10, 1: 10, 3: 10}
    assert choice.pick(out, lambda path: True, 0.0) == (2, 10)


def test_peers_of_one_leaf_share_its_round_robin():
    config = TransportConfig(paths=4, path_choice="ethereal", leaf_ranks=4)
    choices = PathChoices(config, 9, rng())
    messages = {peer: message(8, peer) for peer in range(4)}
    to = {peer: choices.to(peer) for peer in messages}
    for peer, out in messages.items():
        to[peer].on_started(out)
    paths = [to[peer].pick(out, lambda path: True, 0.0) for peer, out in messages.items()]
    assert {path for path, _ in paths} == set(range(4))  # type: ignore[misc]
    assert {most for _, most in paths} == {8}  # type: ignore[misc]  # four flows, four paths: all whole
    other = message(8, 4)
    alone = choices.to(4)
    alone.on_started(other)
    assert alone.pick(other, lambda path: True, 0.0)[1] == 2  # type: ignore[index]  # another leaf: one flow, four parts


def test_a_path_that_is_left_is_taken_out_and_comes_back():
    leaf = Leaf(4, 0)
    choice = EtherealChoice(leaf, 4)
    out = message(40)
    choice.on_started(out)
    taken: Counter[int] = Counter()
    for _ in range(2):
        path, _ = choice.pick(out, lambda path: True, 0.0)  # type: ignore[misc]
        taken[path] += out.take_run(5)[1]
    choice.on_left(1, now=0.0)
    later: Counter[int] = Counter()
    while not out.all_sent:
        path, most = choice.pick(out, lambda path: True, 0.0)  # type: ignore[misc]
        later[path] += out.take_run(most)[1]
    assert later == {0: 10, 2: 10, 3: 10}
    choice.on_back(1, now=1.0)
    choice.on_ended(out)
    after = message(8, 1)
    choice.on_started(after)
    used = set()
    while not after.all_sent:
        path, most = choice.pick(after, lambda path: True, 0.0)  # type: ignore[misc]
        used.add(path)
        after.take_run(most)
    assert used == set(range(4))


def test_repairs_take_any_path_and_change_no_part():
    choice = EtherealChoice(Leaf(4, 0), 4)
    out = message(16)
    choice.on_started(out)
    out.take_run(choice.pick(out, lambda path: True, 0.0)[1])  # type: ignore[index]
    out.add_lost(np.arange(3, dtype=np.uint32))
    assert {choice.pick(out, lambda path: True, 0.0) for _ in range(8)} == {
        (path, ANY_CHUNKS) for path in range(4)
    }
    out.take_lost(3)
    taken: Counter[int] = Counter()
    while not out.all_sent:
        path, most = choice.pick(out, lambda path: True, 0.0)  # type: ignore[misc]
        taken[path] += out.take_run(most)[1]
    assert sorted(taken.values()) == [4, 4, 4]
