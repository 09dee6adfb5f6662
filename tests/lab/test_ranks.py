"""The parent's side of an experiment's workers: answers by rank, and every way in which one may fail."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from dblp.sim.lab import ranks as ranks_module
from dblp.sim.lab.ranks import RankError, Ranks

pytestmark = pytest.mark.processes


class Here:
    """Hosts without namespaces."""

    hosts = tuple(SimpleNamespace(address="127.0.0.1", interface=f"e{rank}") for rank in range(3))

    def __init__(self):
        self.children = []

    def popen(self, host, argv, **options):
        self.children.append(subprocess.Popen(argv, **options))
        return self.children[-1]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(ranks_module, "WORKER", "tests.lab.fake_worker")
    return Here()


def test_the_network_alone_impairs(here, monkeypatch):
    monkeypatch.setenv("DBLP_IMPAIR", "loss(0.5)")
    with Ranks(here) as ranks:
        assert [event["impair"] for event in ranks.command({"do": "work"}, timeout_s=60)] == [None] * 3


def test_answers_come_by_rank(here):
    heard = []
    with Ranks(here) as ranks:
        for _ in range(2):
            done = ranks.command(
                {"do": "work"}, timeout_s=60, on_event=lambda rank, event: heard.append(rank)
            )
            assert [(event["rank"], event["host"]) for event in done] == [(0, "e0"), (1, "e1"), (2, "e2")]
    assert sorted(heard) == [0, 0, 1, 1, 2, 2]
    assert [child.returncode for child in here.children] == [0, 0, 0]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("die", "rank 1 of 3 ended: exit code 3\nlast words$"),
        ("kill", "rank 1 of 3 ended: killed by signal 9$"),
        ("fail", "rank 1 of 3 failed: no room"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_last_words(here, what, says):
    with pytest.raises(RankError, match=says), Ranks(here) as ranks:
        ranks.command({"do": what, "rank": 1}, timeout_s=60)
    assert all(child.poll() is not None for child in here.children)


def test_a_rank_that_does_not_answer_is_named_and_all_are_ended(here, monkeypatch):
    monkeypatch.setattr(ranks_module, "_END_S", 0.2)
    with pytest.raises(RankError, match="no answer to 'hang' from rank 2 in time"), Ranks(here) as ranks:
        ranks.command({"do": "work"}, timeout_s=60)
        ranks.command({"do": "hang", "rank": 2}, timeout_s=1)
    assert all(child.poll() is not None for child in here.children)


def test_a_rank_that_is_gone_is_found_at_the_next_command(here):
    with pytest.raises(RankError, match="rank 0 of 3 ended"), Ranks(here) as ranks:
        ranks.command({"do": "work"}, timeout_s=60)
        here.children[0].kill()
        here.children[0].wait()
        ranks.command({"do": "work"}, timeout_s=60)


def test_workers_that_cannot_start(here, monkeypatch):
    monkeypatch.setattr(ranks_module, "WORKER", "tests.lab.nosuch")
    with pytest.raises(RankError, match=r"No module named tests\.lab\.nosuch"), Ranks(here) as ranks:
        ranks.command({"do": "work"}, timeout_s=60)
