"""Places: where in the callbacks on a round's end a collective was called, as a number that is the same on all ranks.

A future's callbacks are counted as they are added, the calls in a callback as they are made, and the rounds of a call as they
begin. A callback's own future (what ``then`` returns) has callbacks again, and so has each call's. A place is the way there:

    callback (call round | callback ...) [callback ...]

Its code is a 1 and then, for each step of the way, bits that no other step begins with: for a callback its number in Elias' gamma
code, and 0 or 1 for whether its future or a call comes next; for a call its number in the exponential Golomb code of order 2, and
its round's in gamma. The numbers count from 0. Different ways have different codes, and short ways, short ones.
"""

from __future__ import annotations

from collections.abc import Iterator

START = 1
"""Code of the future of the round itself."""
_CALL_ORDER = 2


def add_callback(code: int, index: int) -> int:
    """The ``index``-th callback on the future with this code."""
    return _golomb(code, index, 0)


def add_result(code: int) -> int:
    """The future that the callback with this code makes."""
    return code << 1


def add_call(code: int, index: int) -> int:
    """The ``index``-th call in the callback with this code; without its round."""
    return _golomb(code << 1 | 1, index, _CALL_ORDER)


def add_round(code: int, index: int) -> int:
    """The ``index``-th round of the call with this code; that with 0 stands for the call's future as well."""
    return _golomb(code, index, 0)


def join(code: int, below: int) -> int:
    """The way of ``below``, which begins at the future with this code."""
    bits = below.bit_length() - 1
    return code << bits | below & (1 << bits) - 1


def place_name(code: int) -> str:
    """The way for people, everything counted from 1: ``1:1`` is the first call in the first callback, ``1.1:2`` the second in
    the first callback on that callback's future, ``1:1/2:1`` the first in the second callback on the future of ``1:1``. Further
    rounds of a call are ``1:1+1`` and so on. What is no code is written in hexadecimal."""
    try:
        return _name(iter(format(code, "b")[1:]))
    except StopIteration:
        return f"{code:#x}"


def _name(bits: Iterator[str]) -> str:
    ways = []
    while True:
        callbacks = [_read(bits, 0)]
        while next(bits) == "0":
            callbacks.append(_read(bits, 0))
        call, round_ = _read(bits, _CALL_ORDER), _read(bits, 0)
        way = (
            ".".join(str(index + 1) for index in callbacks)
            + f":{call + 1}"
            + (f"+{round_}" if round_ else "")
        )
        ways.append(way)
        following = next(bits, "")
        if not following:
            return "/".join(ways)
        bits = iter(following + "".join(bits))


def _golomb(code: int, number: int, order: int) -> int:
    """``code``, and behind it a number of at least 0 in the exponential Golomb code of an order; order 0 is Elias' gamma code."""
    value = number + (1 << order)
    bits = value.bit_length()
    return code << 2 * bits - 1 - order | value


def _read(bits: Iterator[str], order: int) -> int:
    zeros = 0
    while next(bits) == "0":
        zeros += 1
    value = 1
    for _ in range(zeros + order):
        value = value << 1 | int(next(bits))
    return value - (1 << order)
