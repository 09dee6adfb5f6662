"""Many small rounds in quick succession: what they cost on a network that loses nothing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dblp.collectives.group import Group
from dblp.transport import feedback, send_path
from dblp.transport.sender import PeerSender
from tests.collectives.worlds import run_network

ROUNDS = 150


@pytest.mark.parametrize("elements", [256, 1024])
def test_nothing_is_sent_twice_where_nothing_is_lost(elements: int) -> None:
    """Rounds of a fifth of a millisecond: more control datagrams than a feedback's masks cover leave within the longest that
    feedback may wait. What its window had left behind was taken for lost, and said again in copies."""

    async def member(group: Group) -> tuple[int, int, bool]:
        array = np.full(elements, group.rank, np.float32)
        before = [sender.datagrams_sent for sender in senders(group)]
        for _ in range(ROUNDS):
            await group.all_reduce(array, "max")
        sent = sum(s.datagrams_sent for s in senders(group)) - sum(before)
        lost = sum(path.lost_lately > 0.0 for s in senders(group) for path in s.paths)
        return sent, lost, bool((array == 2).all())

    for sent, lost, right in run_network(member, 3):
        assert right
        assert not lost
        # To each of two peers at most OPEN, three chunks and FINAL, and a tenth as many feedbacks.
        assert sent <= 5.5 * 2 * ROUNDS


def senders(group: Group) -> list[PeerSender]:
    return list(group._endpoint.core.senders.values())  # type: ignore[attr-defined]


def test_a_message_of_one_chunk_takes_one_datagram_and_its_final() -> None:
    async def member(group: Group) -> int:
        array = np.ones(64, np.float32)
        await group.all_reduce(array)
        before = sum(s.datagrams_sent for s in senders(group))
        for _ in range(ROUNDS):
            await group.all_reduce(array)
        return int(sum(s.datagrams_sent for s in senders(group)) - before)

    for sent in run_network(member, 3):
        assert sent <= 2.2 * 2 * ROUNDS


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("mebibytes", [1, 2])
def test_no_step_waits_for_a_delayed_feedback(
    world_size: int, mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring's messages together are more than may come before their receives are known to be posted. The last of them waited
    for a grant, which came with the next feedback: 4 ms of a round that takes 0.3. What earlier ones gave back is enough."""
    monkeypatch.setattr(feedback, "FEEDBACK_DELAY_S", 50e-3)
    monkeypatch.setattr(send_path, "MIN_RTO_S", 0.1)

    async def member(group: Group) -> list[float]:
        loop, seconds = asyncio.get_running_loop(), []
        for _ in range(6):
            array = np.ones(mebibytes << 18, np.float32)
            begun = loop.time()
            await group.all_reduce(array)
            seconds.append(loop.time() - begun)
            await asyncio.sleep(20e-3)
        return seconds

    rounds = [max(times) for times in zip(*run_network(member, world_size, seed=1), strict=True)]
    assert max(rounds[1:]) < 5e-3, rounds
