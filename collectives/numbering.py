"""Which number a round gets: by the order of the calls, or, of a call in a callback, by the call whose end the callback follows.

All ranks call a group's collectives in the same order, and that order numbers the rounds. Not so where a callback on the end of
one call makes the next, as in communication hooks of two steps: a rank that is slow to make its second call has ended
the first before, and its callback's call comes between; on a fast rank it comes behind. So what a callback calls is numbered by
itself: by the number of the first call and how many such calls were made before, which is the same on every rank whenever its
callbacks run. Calls in callbacks on the ends of such calls count among those of the first.

On the wire these rounds are those of a group of their own, which begin in any order (``rounds.ANY_ORDER_BIT``). Everything but
``Origin()`` and ``in_callback`` is of the engine's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from dblp.transport.rounds import MOST_FOLLOWING, following

T = TypeVar("T")
_calling: ContextVar[Origin | None] = ContextVar("dblp_calling", default=None)
"""On the engine: the call whose rounds begin."""
_ended: ContextVar[Origin | None] = ContextVar("dblp_ended", default=None)
"""On any thread: the call whose callback runs."""


class RoundNumber(NamedTuple):
    """Of one round. ``group`` and ``round`` make its ids on the wire; for people it is ``number``, or the ``following``-th of the
    calls in that round's callbacks, 0 being the round itself."""

    group: int
    round: int
    number: int
    following: int = 0

    def __str__(self) -> str:
        return f"{self.number}.{self.following}" if self.following else str(self.number)


class Origin:
    """One call, by which its rounds are known and what its callbacks call is numbered. Made where the call is made."""

    __slots__ = ("_following", "_number", "_numbering", "_root")

    def __init__(self) -> None:
        ended = _ended.get()
        self._root: Origin | None = None if ended is None else ended._root or ended
        self._numbering: Numbering | None = None
        self._number = -1
        self._following = 0


class Numbering:
    """The rounds of one group."""

    def __init__(self, group_id: int) -> None:
        self._id = group_id
        self._next = 0

    def take(self) -> RoundNumber:
        """The number of a round that begins now."""
        origin = _calling.get()
        root = None if origin is None else origin._root
        if root is not None and root._numbering is self and root._following < MOST_FOLLOWING:
            root._following += 1
            return RoundNumber(
                *following(self._id, root._number, root._following), root._number, root._following
            )
        number, self._next = self._next, self._next + 1
        if origin is not None and origin._numbering is None:  # of several rounds the first
            origin._numbering, origin._number, origin._root = self, number, None
        return RoundNumber(self._id, number, number)


def begin_as(origin: Origin, begin: Callable[[], T]) -> T:
    """``begin()``, and what it starts on the loop, as the rounds of a call."""
    token = _calling.set(origin)
    try:
        return begin()
    finally:
        _calling.reset(token)


@contextlib.contextmanager
def in_callback(origin: Origin) -> Iterator[None]:
    """What this thread calls inside follows the end of a call."""
    token = _ended.set(origin)
    try:
        yield
    finally:
        _ended.reset(token)
