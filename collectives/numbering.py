"""Which number a round gets: by the order of the calls, or, of a call in a callback, by its place there.

All ranks call a group's collectives in the same order, and that order numbers the rounds. Not so where a callback on the end of
one call makes the next, as in communication hooks of two steps: a rank that is slow to make its second call has ended
the first before, and its callback's call comes between; on a fast rank it comes behind. So what a callback calls is numbered by
itself: by the number of the first call and by the way from there (``transport.places``), which is the same on every rank whenever
its callbacks run.

On the wire these rounds are those of a group of their own, which begin in any order (``rounds.ANY_ORDER_BIT``). Calls and
callbacks are counted where they are made and added, which a program does in one order on all ranks; rounds on the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from dblp.errors import UnsupportedError
from dblp.transport import places
from dblp.transport.rounds import MOST_BEHIND, PLACE_BITS, following

T = TypeVar("T")

_calling: ContextVar[Origin | None] = ContextVar("dblp_calling", default=None)
"""On the engine: the call whose rounds begin."""
_running: ContextVar[Callback | None] = ContextVar("dblp_running", default=None)
"""On any thread: the callback that runs."""


class RoundNumber(NamedTuple):
    """Of one round. ``group`` and ``round`` make its ids on the wire; for people it is ``number``, or of what follows that round
    its ``place``, 0 being the round itself."""

    group: int
    round: int
    number: int
    place: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{places.place_name(self.place)}" if self.place else str(self.number)


class Origin:
    """One call, by which its rounds are known and what follows it is numbered. Made where the call is made. It counts the
    callbacks on its future, as ``Future`` does on others; it refers to none of them, since a cycle would outlive each call."""

    __slots__ = ("_callbacks", "_code", "_number", "_numbering", "_root", "_rounds")

    def __init__(self) -> None:
        callback = _running.get()
        self._root: Origin | None = None
        self._code = places.START
        if callback is not None:
            self._root, self._code = callback.next_call()
        self._numbering: Numbering | None = None  # its first round's, unless that follows another
        self._number = -1
        self._rounds = 0
        self._callbacks = 0

    def next_callback(self) -> Callback:
        """One more is added to its future."""
        self._callbacks += 1
        return Callback(self, places.add_callback(places.START, self._callbacks - 1))

    @property
    def placed(self) -> bool:
        """It was made in a callback."""
        return self._root is not None

    def below(self, code: int) -> tuple[Origin, int]:
        """The call at the root, and the code there, of what has ``code`` below this one; once its rounds have begun."""
        return (self, code) if self._root is None else (self._root, places.join(self._code, code))


class Future:
    """A future that a callback makes, whose callbacks are counted."""

    __slots__ = ("_callbacks", "_code", "_origin")

    def __init__(self, origin: Origin, code: int) -> None:
        """``code``: below ``origin``."""
        self._origin = origin
        self._code = code
        self._callbacks = 0

    def next_callback(self) -> Callback:
        """One more is added."""
        self._callbacks += 1
        return Callback(self._origin, places.add_callback(self._code, self._callbacks - 1))


class Callback:
    """A callback whose calls are counted."""

    __slots__ = ("_calls", "_code", "_origin")

    def __init__(self, origin: Origin, code: int) -> None:
        self._origin = origin
        self._code = code
        self._calls = 0

    def next_call(self) -> tuple[Origin, int]:
        """One more is made: the call at the root, and the code of this one's first round there."""
        self._calls += 1
        root, code = self._origin.below(places.add_call(self._code, self._calls - 1))
        return root, places.add_round(code, 0)

    @property
    def result(self) -> Future:
        """The future that it makes."""
        return Future(self._origin, places.add_result(self._code))


class Numbering:
    """The rounds of one group."""

    def __init__(self, group_id: int) -> None:
        self._id = group_id
        self._next = 0

    def take(self) -> RoundNumber:
        """The number of a round that begins now. Raises UnsupportedError for what follows a round that lies too far back."""
        origin = _calling.get()
        if origin is None:
            return self._in_order()
        index, origin._rounds = origin._rounds, origin._rounds + 1
        root = origin._root
        if root is not None and root._numbering is self:
            code = places.add_round(origin._code >> 1, index)  # without the bit of round 0
            if code.bit_length() <= PLACE_BITS:
                self._check(root._number)
                return RoundNumber(*following(self._id, root._number, code), root._number, code)
        number = self._in_order()
        if index == 0:  # what follows it is numbered by it
            origin._numbering, origin._number, origin._root = self, number.number, None
        return number

    def _in_order(self) -> RoundNumber:
        number, self._next = self._next, self._next + 1
        return RoundNumber(self._id, number, number)

    def _check(self, root: int) -> None:
        if self._next - root > MOST_BEHIND:
            raise UnsupportedError(
                f"a collective in a callback on round {root}, {self._next - root} rounds later: at most {MOST_BEHIND} can be "
                "told apart; call it outside of the callback, or add the callback when the call is made"
            )


def begin_as(origin: Origin, begin: Callable[[], T]) -> T:
    """``begin()``, and what it starts on the loop, as the rounds of a call."""
    token = _calling.set(origin)
    try:
        return begin()
    finally:
        _calling.reset(token)


@contextlib.contextmanager
def in_callback(callback: Callback) -> Iterator[None]:
    """What this thread calls inside is called by a callback."""
    token = _running.set(callback)
    try:
        yield
    finally:
        _running.reset(token)
