"""Sorting what comes: which datagrams belong together, whose they are, and whether they are to be believed.

Theory of operation. A batch is a sequence of slabs, runs of equal datagrams. Stacks of super-packets go to their peer's receiver
as trains, what is left of broken bursts all together (``remnants``), all else in groups that start with a datagram whose header
is checked: session, version, rank, length, path, type, in this order, and what fails is dropped and counted under the first that
does. Nothing here knows of rounds or messages: chunks go to the peer's receiver, handshakes and control datagrams to the core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from dblp.transport import remnants, wire
from dblp.transport.config import HEADER_BYTES
from dblp.transport.drop import Drop
from dblp.transport.port import Address, Slab
from dblp.transport.receiver import PeerReceiver
from dblp.transport.remnants import Remnants
from dblp.transport.wire import Type

Header = tuple[int, ...]
"""The fields of a header, in the order of the wire (``wire.decode_header_from``)."""
OnControl = Callable[[PeerReceiver, Slab, int, int, Header, float], None]
"""``(receiver, slab, at, size, header, now)``: a control datagram of a peer whose path is proved, ``size`` bytes."""

_HANDSHAKE = (Type.HELLO, Type.RETRY, Type.WELCOME, Type.REFUSE)
_TYPES = frozenset(int(type_) for type_ in Type)
_FAREWELLS = (Type.CLOSE, Type.ABORT)
_BUNDLED = _TYPES - {Type.DATA, *_HANDSHAKE}
"""Types that may share a datagram."""


class Intake:
    """Takes received batches for one rank. ``proved``: the (peer, path) pairs whose address the handshake has proved so far.
    ``on_handshake(slab, at, now)`` and ``on_other_version(header, source, size)`` are told of datagrams of this session only."""

    def __init__(
        self,
        receivers: Mapping[int, PeerReceiver],
        *,
        session: int,
        proved: Collection[tuple[int, int]],
        drops: Counter[Drop],
        on_control: OnControl,
        on_handshake: Callable[[Slab, int, float], None],
        on_other_version: Callable[[Header, Address, int], None],
    ) -> None:
        self._receivers = receivers
        self._session = session
        self._proved = proved
        self._drops = drops
        self._on_control = on_control
        self._on_handshake = on_handshake
        self._on_other_version = on_other_version

    def take(self, batch: Sequence[Slab], now: float) -> None:
        """Take a batch of slabs; valid during the call only."""
        if remnants.few(batch):
            self._take_slabs(batch, now)
        else:
            self._take_batch(batch, now)

    def _take_batch(self, batch: Sequence[Slab], now: float) -> None:
        """Take many slabs: those that are small and alike together."""
        run: list[Slab] = []
        for slab in batch:
            if run and not remnants.joins(run[0], slab):
                if _is_feedback(slab):  # data does not depend on it
                    self._on_group(slab, 0, now)
                    continue
                self._take_run(run, now)
                run = []
            if remnants.may_be_remnant(slab):
                run.append(slab)
                continue
            self._take_run(run, now)
            run = []
            self._take_slabs((slab,), now)
        self._take_run(run, now)

    def _take_run(self, run: Sequence[Slab], now: float) -> None:
        """Take neighbouring slabs of one size."""
        if not remnants.worth(run):
            self._take_slabs(run, now)
            return
        found = Remnants(run)
        for rows in found.groups():
            header = found.header(int(rows[0]))
            receiver = self._receiver_of(header, found.size)
            if receiver is not None and receiver.on_remnants(found, rows, header, now):
                self._heard(receiver, found.header(int(rows[-1])), now)
                continue
            for slab, first, last in found.slabs_of(rows):
                while first <= last:
                    first += self._on_group(slab, first, now)

    def _take_slabs(self, slabs: Sequence[Slab], now: float) -> None:
        """Take slabs one by one."""
        for slab in slabs:
            if slab.count > 1 or slab.supers > 1:
                self._take_stack(slab, now)
            else:
                self._on_group(slab, 0, now)

    def _take_stack(self, slab: Slab, now: float) -> None:
        """Take a run of datagrams, or a stack of super-packets: trains at once, the rest in groups."""
        done, supers = 0, slab.supers
        while done < supers:
            bursts = self._on_train(slab, done, now) if slab.last == slab.size else 0
            if not bursts:
                bursts, at = 1, 0
                part = slab if supers == 1 else slab.part(done)
                while at < part.count:
                    at += self._on_group(part, at, now)
            done += bursts

    def _on_train(self, slab: Slab, done: int, now: float) -> int:
        """Take as many super-packets of a stack, from ``done`` on, as form one train; returns how many, 0 with nothing done."""
        header = wire.decode_header_from(slab.arena.data, slab.offset + done * slab.spacing)
        receiver = self._receiver_of(header, slab.size)
        bursts = receiver.on_train(slab, done, header, now) if receiver is not None else 0
        if receiver is not None and bursts:
            self._heard(receiver, header, now)
        return bursts

    def _receiver_of(self, header: Header, size: int) -> PeerReceiver | None:
        """Whose DATA of ``size`` bytes has this header; None if there is anything wrong with it."""
        receiver = self._receivers.get(header[6])
        if (
            receiver is None
            or header[0] != wire.VERSION
            or header[1] != Type.DATA
            or header[7] != self._session
            or header[15] != size - HEADER_BYTES
            or header[2] & ~wire.FLAGS_MASK
            or (header[6], header[3]) not in self._proved
        ):
            return None
        return receiver

    @staticmethod
    def _heard(receiver: PeerReceiver, header: Header, now: float) -> None:
        """What any header of a peer tells."""
        receiver.heard_at = now
        if header[12]:
            receiver.on_watermark(header[8] >> 48, header[12])

    def _on_group(self, slab: Slab, at: int, now: float) -> int:
        """Handle datagram ``at`` of a slab and as many that follow as belong to it; returns how many."""
        size = slab.last if at == slab.count - 1 else slab.size
        if size < HEADER_BYTES:
            self._drops[Drop.SHORT] += 1
            return 1
        header = wire.decode_header_from(slab.arena.data, slab.offset + at * slab.stride)
        if header[7] != self._session:
            self._drops[Drop.SESSION] += 1
            return 1
        if header[0] != wire.VERSION:
            self._drops[Drop.VERSION] += 1
            self._on_other_version(header, slab.source(at), size)
            return 1
        receiver = self._receivers.get(header[6])
        if receiver is None:
            self._drops[Drop.RANK] += 1
            return 1
        type_ = header[1]
        if header[15] != size - HEADER_BYTES:
            if header[15] < size - HEADER_BYTES and type_ in _BUNDLED:
                self._on_bundle(slab, at, size, now)
            else:
                self._drops[Drop.LENGTH] += 1
            return 1
        if type_ in _HANDSHAKE:
            self._on_handshake(slab, at, now)
            return 1
        if (header[6], header[3]) not in self._proved:
            if type_ in _FAREWELLS:  # of one that does not wait for this handshake any more
                self._on_handshake(slab, at, now)
            else:
                self._drops[Drop.NOT_CONNECTED] += 1
            return 1
        if type_ not in _TYPES or header[5] >= wire.BURST_DATAGRAMS or header[2] & ~wire.FLAGS_MASK:
            self._drops[Drop.TYPE] += 1
            return 1
        self._heard(receiver, header, now)
        if type_ == Type.DATA:
            return receiver.on_data(slab, at, slab.count - at, header, now)
        self._on_control(receiver, slab, at, size, header, now)
        return 1

    def _on_bundle(self, slab: Slab, at: int, size: int, now: float) -> None:
        """Handle the records of a datagram that holds several control datagrams."""
        start = slab.offset + at * slab.stride
        stop, arrived = start + size, slab.arrival(at)
        while start < stop:
            length = stop - start
            if length >= HEADER_BYTES:
                length = min(length, HEADER_BYTES + wire.decode_header_from(slab.arena.data, start)[15])
            record = Slab(
                slab.arena, start, length, length, 1, length, slab.path, arrived, lambda _: slab.source(at)
            )
            self._on_group(record, 0, now)
            start += length


def _is_feedback(slab: Slab) -> bool:
    """One datagram that is FEEDBACK and nothing else."""
    if slab.count > 1 or slab.supers > 1 or slab.size < HEADER_BYTES:
        return False
    header = wire.decode_header_from(slab.arena.data, slab.offset)
    return bool(header[1] == Type.FEEDBACK and header[15] == slab.size - HEADER_BYTES)
