"""What is in flight to a peer: the bursts of each (path, class) that left, and the control datagrams among them."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from dblp.transport import wire
from dblp.transport.outgoing import Outgoing
from dblp.transport.wire import Type

KEPT_LOST = 64
"""Flights declared lost that are remembered per (path, class), to notice that they had only been late."""


_FULL_MASKS: dict[tuple[int, int], int] = {}


def full_mask(bursts: int, count: int) -> int:
    """All datagrams of ``bursts`` bursts of ``count`` each: 64 bits a burst, the first burst lowest."""
    mask = _FULL_MASKS.get((bursts, count))
    if mask is None:
        one = (1 << count) - 1
        mask = sum(one << (wire.BURST_DATAGRAMS * burst) for burst in range(bursts))
        _FULL_MASKS[bursts, count] = mask
    return mask


class Flight:
    """What one burst carried, or a train of ``bursts`` full ones. ``unacked`` has a bit for each datagram that is not
    acknowledged yet, 64 bits a burst."""

    __slots__ = (
        "bursts",
        "chunks",
        "control",
        "cost",
        "count",
        "decides",
        "first",
        "message",
        "nbytes",
        "order",
        "sent_at",
        "seq",
        "unacked",
    )

    def __init__(
        self,
        seq: int,
        count: int,
        nbytes: int,
        sent_at: float,
        message: Outgoing | None,
        first: int,
        chunks: npt.NDArray[np.uint32] | None,
        control: Control | None,
        cost: int,
        bursts: int = 1,
        *,
        decides: bool = True,
        order: int = 0,
    ) -> None:
        self.order = order  # among all that left on the path, whatever its class
        self.decides = decides  # no copies of its chunks follow: where it is lost, they are
        self.seq = seq
        self.count = count  # datagrams in each burst
        self.bursts = bursts
        self.unacked = full_mask(bursts, count)
        self.nbytes = nbytes  # of what is not acknowledged yet, as ``cost``
        self.cost = cost  # at the kernel's charge, see SendPath.charge
        self.sent_at = sent_at
        self.message = message
        self.first = first
        self.chunks = chunks  # None: chunks first..first+count-1
        self.control = control

    @property
    def last_unacked(self) -> int:
        """Number of the last datagram that is not acknowledged: 64 for each burst of the class on this path, then the place."""
        return self.seq * wire.BURST_DATAGRAMS + self.unacked.bit_length() - 1

    def chunks_at(self, bits: int) -> npt.NDArray[np.uint32]:
        """Chunk indices at the positions whose bits are set."""
        raw = np.frombuffer(bits.to_bytes(8 * self.bursts, "little"), np.uint8)
        burst, place = np.divmod(np.flatnonzero(np.unpackbits(raw, bitorder="little")), wire.BURST_DATAGRAMS)
        places: npt.NDArray[np.uint32] = (burst * self.count + place).astype(np.uint32)
        if self.chunks is None:
            return places + np.uint32(self.first)
        return self.chunks[places]


class Control:
    """A control datagram that waits to leave; ``reliable`` ones leave again when they are lost."""

    __slots__ = (
        "about",
        "chunks",
        "cls",
        "copies",
        "dropped",
        "message",
        "path",
        "payload",
        "reliable",
        "type",
    )

    def __init__(
        self,
        type_: Type,
        message: int,
        payload: bytes = b"",
        *,
        chunks: int = 0,
        cls: int = 0,
        path: int | None = None,
        about: int = 0,
    ) -> None:
        """``path``: the one to take, None: any; ``about``: the path that a FEEDBACK speaks of."""
        self.type = type_
        self.about = about
        self.message = message
        self.payload = payload
        self.chunks = chunks
        self.cls = cls
        self.path = path
        self.reliable = type_ in (Type.OPEN, Type.FINAL, Type.ABORT, Type.LEFT)
        self.dropped = False
        self.copies = 0  # of a question: so many leave, and as many answers are wanted

    def copy(self) -> Control:
        """The same once more, to be sent once only."""
        copy = Control(
            self.type,
            self.message,
            self.payload,
            chunks=self.chunks,
            cls=self.cls,
            path=self.path,
            about=self.about,
        )
        copy.reliable = False
        return copy


class SendSpace:
    """Bursts of one class on one path."""

    __slots__ = ("acked_order", "flights", "largest_acked", "lost", "next_seq")

    def __init__(self) -> None:
        self.next_seq = 0
        self.flights: deque[Flight] = deque()
        self.largest_acked = -1  # number of the newest datagram that arrived, as ``Flight.last_unacked``
        self.acked_order = -1  # ``Flight.order`` of the newest flight of which something arrived
        self.lost: deque[Flight] = deque(maxlen=KEPT_LOST)

    def unanswered(self) -> bool:
        """Something is in flight of which neither it nor anything behind it is known to have arrived: only a question tells."""
        return bool(self.flights) and self.flights[-1].last_unacked > self.largest_acked

    def free_bursts(self) -> int:
        """Bursts that may leave before the oldest unacknowledged one falls out of the mask window."""
        return wire.MASK_WINDOW - (self.next_seq - self.flights[0].seq) if self.flights else wire.MASK_WINDOW
