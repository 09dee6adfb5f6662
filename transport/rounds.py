"""Which rounds have begun and ended here, by group: what is late, and the watermark that peers are told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dblp.transport.message import ROUND_BITS, RoundCounters
from dblp.transport.places import place_name
from dblp.transport.standing import Stand, Standing, not_called

ANY_ORDER_BIT = 1 << 15
"""Groups with this bit (transfers, and collectives that callbacks call) begin their rounds in any order, so no watermark speaks
for them."""
COLLECTIVE_BIT = 1 << 14
"""Of groups with ``ANY_ORDER_BIT``: their rounds are collectives, not transfers."""
REMEMBERED = 8192
"""Ended rounds of such groups that are remembered to recognise what comes late."""
_ROUND_MASK = (1 << ROUND_BITS) - 1
PLACE_BITS = 18
"""Bits of a following round that say where it was called; the others hold the low bits of the round that it follows."""
_ROOTS = 1 << ROUND_BITS - PLACE_BITS
FORGET_AFTER = _ROOTS // 4
"""Rounds of a group after which what followed one is over everywhere, and its ids may come back."""
MOST_BEHIND = 3 * FORGET_AFTER
"""Rounds of a group after which nothing may follow a round any more."""
FORGET_EVERY = 1024
"""Rounds of a group between two looks for what is to be forgotten."""


def following(group: int, number: int, place: int) -> tuple[int, int]:
    """Group and round, as they go over the wire, of the collective that is called at ``place`` in the callbacks on round
    ``number`` of ``group``; ``place`` is above 0 and has ``PLACE_BITS``."""
    return ANY_ORDER_BIT | COLLECTIVE_BIT | group, number % _ROOTS << PLACE_BITS | place


def parts_of(round_: int) -> tuple[int, int]:
    """Of a following round: the low bits of the round that it follows, and its place."""
    return round_ >> PLACE_BITS, round_ & (1 << PLACE_BITS) - 1


def round_name(group: int, round_: int) -> str:
    """What people read of the two ids on the wire: ``group:round``, ``group:round/place`` of what a callback called (``round``
    without its high bits), and ``group:p2p`` of a transfer."""
    plain = group & ~(ANY_ORDER_BIT | COLLECTIVE_BIT)
    if not group & ANY_ORDER_BIT:
        return f"{group}:{round_}"
    if not group & COLLECTIVE_BIT:
        return f"{plain}:p2p"
    root, place = parts_of(round_)
    return f"{plain}:{root}/{place_name(place)}"


def is_past(key: int, group: int, number: int) -> bool:
    """The round follows one of ``group`` that lies so far behind ``number`` that all is over."""
    if group & ANY_ORDER_BIT or key >> ROUND_BITS != ANY_ORDER_BIT | COLLECTIVE_BIT | group:
        return False
    root, _ = parts_of(key & _ROUND_MASK)
    return FORGET_AFTER <= (number - root) % _ROOTS < MOST_BEHIND


def is_collective(key: int) -> bool:
    """It is a round of a collective, which needs all ranks, not a transfer."""
    return key >> ROUND_BITS & (ANY_ORDER_BIT | COLLECTIVE_BIT) != ANY_ORDER_BIT


class Round:
    """A round that is under way here."""

    __slots__ = ("counters", "describe", "key", "signature", "standing")

    def __init__(
        self,
        key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None,
    ) -> None:
        self.key = key
        self.standing = standing
        self.signature = signature
        self.describe = describe
        self.counters = RoundCounters()


class _Group:
    __slots__ = ("active", "top")

    def __init__(self) -> None:
        self.active: OrderedDict[int, None] = OrderedDict()
        self.top = 0


class RoundBook:
    """All rounds of an endpoint."""

    def __init__(self) -> None:
        self.active: dict[int, Round] = {}
        self._groups: dict[int, _Group] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def begin(
        self,
        key: int,
        signature: bytes,
        describe: Callable[[bytes], str],
        standing: Callable[[], Standing] | None = None,
    ) -> Round:
        """A round begins; rounds of a group begin in ascending order (but for ``ANY_ORDER_BIT`` groups)."""
        round_ = self.active[key] = Round(key, signature, describe, standing)
        group = self._groups.setdefault(key >> ROUND_BITS, _Group())
        number = key & _ROUND_MASK
        if number % FORGET_EVERY == 0 and self._ended:
            for ended in [ended for ended in self._ended if is_past(ended, key >> ROUND_BITS, number)]:
                del self._ended[ended]
        group.active[number] = None
        group.top = max(group.top, number + 1)
        return round_

    def end(self, key: int) -> None:
        """A round is over."""
        if self.active.pop(key, None) is None:
            return
        number = key >> ROUND_BITS
        self._groups[number].active.pop(key & _ROUND_MASK, None)
        if number & ANY_ORDER_BIT:
            self._ended[key] = None
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def over(self, key: int) -> bool:
        """The round has ended here."""
        if key in self.active:
            return False
        number = key >> ROUND_BITS
        if number & ANY_ORDER_BIT:
            return key in self._ended
        group = self._groups.get(number)
        return group is not None and (key & _ROUND_MASK) < group.top

    def standing(self, key: int) -> Standing:
        """How this rank stands with a round, whether or not it has begun."""
        round_ = self.active.get(key)
        if round_ is not None and round_.standing is not None:
            return round_.standing()
        if self.over(key):
            return Standing(stand=Stand.OVER)
        return not_called(other.standing() for other in self.active.values() if other.standing is not None)

    def watermark(self, group_id: int) -> int:
        """All rounds of the group below this number have ended here; 0 says nothing."""
        group = self._groups.get(group_id)
        if group is None or group_id & ANY_ORDER_BIT:
            return 0
        return next(iter(group.active)) if group.active else group.top
