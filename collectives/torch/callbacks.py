"""Callbacks on the futures of works know their place, so that what they call is numbered alike on all ranks.

torch's futures cannot be told so otherwise: one that ends with an error must be made by ``then`` (``work.py``), which returns no
subclass, and a callback that is added late runs at once, on whatever thread adds it. So ``then`` and ``add_done_callback`` of
torch's class are wrapped, once a process, when the first future is marked; other futures pass through as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dblp.collectives.numbering import Callback, Future, Origin, in_callback

F = TypeVar("F")
_marks: weakref.WeakKeyDictionary[Any, Origin | Future] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_wrapped = False


def mark(future: F, counted: Origin | Future) -> F:
    """Callbacks on ``future``, and on the futures that come of them, are counted as those of ``counted``; returns ``future``."""
    global _wrapped
    if not _wrapped:
        with _lock:
            if not _wrapped:
                _wrap(torch._C.Future)
                _wrapped = True
    _marks[future] = counted
    return future


def _wrap(kind: Any) -> None:
    plain_then, plain_add = kind.then, kind.add_done_callback

    def then(self: Any, callback: Callable[[Any], Any]) -> Any:
        counted = _marks.get(self)
        if counted is None:
            return plain_then(self, callback)
        place = counted.next_callback()
        return mark(plain_then(self, _placed(callback, place)), place.result)

    def add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
        counted = _marks.get(self)
        plain_add(self, callback if counted is None else _placed(callback, counted.next_callback()))

    then.__doc__, add_done_callback.__doc__ = plain_then.__doc__, plain_add.__doc__
    kind.then, kind.add_done_callback = then, add_done_callback


def _placed(callback: Callable[[Any], Any], place: Callback) -> Callable[[Any], Any]:
    def call(future: Any) -> Any:
        with in_callback(place):
            return callback(future)

    return call
