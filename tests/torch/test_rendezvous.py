"""The rendezvous through a key-value store, on a dictionary and a fake clock."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from dblp.collectives.rendezvous import (
    Member,
    Roster,
    list_ranks,
    make_roster,
    new_member,
    rendezvous_by_store,
)
from dblp.collectives.torch.meeting import meet_by_store
from dblp.errors import DeadlineError, HandshakeError, VersionError
from dblp.transport.port import Address

NO_ENGINE: Any = None
"""Meeting by a store needs none."""


class DictStore:
    """torch's Store protocol on a dictionary."""

    def __init__(self):
        self.table = {}

    def set(self, key, value):
        self.table[key] = value

    def get(self, key):
        return self.table[key]

    def check(self, keys):
        return all(key in self.table for key in keys)

    def add(self, key, amount):
        self.table[key] = self.table.get(key, 0) + amount
        return self.table[key]


def member(rank, world_size=2, **changes):
    made = new_member(rank, world_size, [Address("10.0.0.1", 4000 + rank)], 1464, 1)
    return replace(made, **changes)


def meet(store, rank, world_size=2, timeout_s=5.0, make=member):
    """Join on a clock that jumps with every sleep."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    return rendezvous_by_store(
        store,
        lambda generation: replace(make(rank, world_size), generation=generation),
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        place="10.0.0.9:29500",
        clock=lambda: now[0],
        sleep=sleep,
    )


def publish(store, record, generation=1):
    store.table[f"dblp/{record.world_size}/{generation}/member/{record.rank}"] = record.encode()
    store.table[f"dblp/latest/{record.rank}"] = record.encode()


def test_all_ranks_derive_the_same_roster():
    store = DictStore()
    publish(store, member(1, datagram_bytes=1400))
    first = meet(store, 0)
    second = meet(store, 1)
    assert first.peers == ((Address("10.0.0.1", 4000),), (Address("10.0.0.1", 4001),))
    assert first.datagram_bytes == 1400  # the least of all
    assert second.session == first.session == Member.decode(store.get("dblp/2/1/member/0")).session


def test_a_second_group_does_not_read_the_first_ones_addresses():
    store = DictStore()
    publish(store, member(1))
    meet(store, 0)
    with pytest.raises(DeadlineError, match="rank 1 of 2 has not come"):
        meet(store, 0)
    publish(store, member(1, addresses=(Address("10.0.0.1", 5001),)), generation=3)
    assert meet(store, 0).peers[1] == (Address("10.0.0.1", 5001),)


def test_the_absent_ranks_are_listed_with_place_and_remedy():
    store = DictStore()
    publish(store, member(1, 4))
    with pytest.raises(DeadlineError) as caught:
        meet(store, 0, 4, timeout_s=60)
    assert caught.value.ranks == (2, 3)
    assert "ranks 2, 3 of 4 have not come to the rendezvous at 10.0.0.9:29500 within 60 s" in str(
        caught.value
    )


def test_a_rank_that_was_restarted_alone_is_told_so():
    """The store is that of the group that still runs: the others came in the generation before, and do not come again."""
    store = DictStore()
    publish(store, member(0))
    publish(store, member(1))
    store.add("dblp/2/generation/1", 1)
    with pytest.raises(DeadlineError, match=r"Rank 0 came the time before, .* restart all ranks") as caught:
        meet(store, 1)
    assert caught.value.ranks == (0,)


class DoubledStore(DictStore):
    """Another process comes as rank 0 while the first one waits there."""

    second = ""

    def check(self, keys):
        if not self.second and keys == ["dblp/4/1/member/1"]:
            self.second = "began"
            with pytest.raises(DeadlineError) as caught:
                meet(self, 0, 4, make=partial(member, pid=1))
            self.second = str(caught.value)
        return super().check(keys)


def test_two_processes_of_one_rank_are_both_told_so():
    """Each waits for a meeting of its own number."""
    store = DoubledStore()
    with pytest.raises(
        DeadlineError, match="Another process has come as rank 0 since: give each process a RANK"
    ):
        meet(store, 0, 4)
    assert f"Process {os.getpid()} on " in store.second and "came as rank 0 before this one" in store.second
    assert "was RANK=0 given to two processes" in store.second


def test_who_tries_again_is_not_taken_for_another():
    store = DictStore()
    for _ in range(3):
        with pytest.raises(DeadlineError, match=r"raises the limit\)$"):
            meet(store, 0, 4)


class GoneStore(DictStore):
    """Its server dies at the ``left``-th call from now."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def check(self, keys):
        self.left -= 1
        if self.left < 0:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        return super().check(keys)


@pytest.mark.parametrize("left", [0, 2])
def test_a_store_that_dies_is_named_with_its_place(left, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    monkeypatch.setenv("MASTER_PORT", "29500")
    join = meet_by_store(GoneStore(left), 0, 2, 5.0)
    with pytest.raises(
        HandshakeError, match=r"rank 0 of 2: the store at 10\.0\.0\.9:29500 does not answer"
    ) as caught:
        join(NO_ENGINE, lambda generation: member(0, generation=generation))
    assert "Failed to recv" in str(caught.value) and "torchrun" in str(caught.value)


def test_a_rank_that_does_not_come_is_no_fault_of_the_store():
    with pytest.raises(DeadlineError, match="rank 1 of 2 has not come"):
        meet_by_store(DictStore(), 0, 2, 0.05)(NO_ENGINE, lambda generation: member(0, generation=generation))


class CountingStore(DictStore):
    """Remembers which keys were looked for."""

    def __init__(self):
        super().__init__()
        self.looks = []

    def check(self, keys):
        self.looks.append(keys)
        return super().check(keys)


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(4.0, 2.0), (600.0, 10.0)])
def test_world_sizes_that_differ_are_named_after_a_while(timeout_s, waited_s):
    store = CountingStore()
    publish(store, member(1, world_size=4))
    with pytest.raises(HandshakeError, match="world_size 3, its rank 1 with world_size 4"):
        meet(store, 0, 3, timeout_s=timeout_s)
    least = waited_s / 0.25
    assert least < store.looks.count(["dblp/3/1/member/1"]) < least + 8


def test_a_group_of_another_size_that_had_its_name_is_not_read():
    """After destroy and init torch counts its groups anew: what was the group of rank 2 alone, its rank 0, is now one of two."""
    store = DictStore()
    assert meet(store, 0, 1).peers == ((Address("10.0.0.1", 4000),),)
    publish(store, member(0, world_size=2, addresses=(Address("10.0.0.1", 6000),)))
    assert meet(store, 1, 2).peers[0] == (Address("10.0.0.1", 6000),)


class LateStore(DictStore):
    """The rank that had the name in a group of another size comes late."""

    def __init__(self):
        super().__init__()
        self.looks = 0
        publish(self, member(0, world_size=1))

    def check(self, keys):
        self.looks += 1
        if self.looks == 10:
            publish(self, member(0, world_size=2))
        return super().check(keys)


def test_who_was_in_a_group_of_another_size_may_be_late():
    assert len(meet(LateStore(), 1, 2).peers) == 2


def test_another_protocol_version_is_named():
    store = DictStore()
    publish(store, member(1, version=9))
    with pytest.raises(VersionError, match=r"version 1 .* version 9"):
        meet(store, 0)


def test_path_counts_that_differ_are_named():
    two = (Address("10.0.0.2", 1), Address("10.0.0.2", 2))
    with pytest.raises(HandshakeError, match="1 paths, rank 1 has 2"):
        make_roster([member(0), member(1, addresses=two)])


def test_loopback_is_not_offered_to_another_host():
    near = member(0, addresses=(Address("127.0.0.1", 1),))
    far = member(1, host="elsewhere", host_key="another kernel")
    with pytest.raises(HandshakeError, match="DBLP_IFNAME"):
        make_roster([near, far])
    same_host = member(1, addresses=(Address("127.0.0.1", 2),))
    assert isinstance(make_roster([near, same_host]), Roster)


def test_a_record_survives_coding_and_ignores_unknown_keys():
    import msgpack

    record = member(1, addresses=(Address("fe80::1%eth0", 7), Address("fe80::1%eth0", 8)))
    assert Member.decode(record.encode()) == record
    table = {**msgpack.unpackb(record.encode()), "colour": "red"}
    assert Member.decode(msgpack.packb(table)) == record


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4rank\x01"])
def test_records_that_are_none_raise_a_clear_error(data):
    with pytest.raises(HandshakeError, match="cannot be read"):
        Member.decode(data)


def test_lists_of_ranks_read_well():
    assert list_ranks({3}) == "rank 3"
    assert list_ranks({5, 1, 2}) == "ranks 1, 2, 5"
    assert list_ranks(range(20), most=3) == "ranks 0, 1, 2 and 17 more"
