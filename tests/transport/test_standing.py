"""STATE: how a rank stands with a round, coded, asked and answered."""

from __future__ import annotations

import numpy as np
import pytest

from dblp.transport.rounds import ANY_ORDER_BIT, RoundBook
from dblp.transport.standing import MOST_RANKS, Stand, Standing, decode_state, encode_state, not_called

KEY = 3 << 32 | 7


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stand", Stand)
@pytest.mark.parametrize(("waits_for", "silent"), [((), ()), ((5,), ()), ((0, 65_535), (1, 2, 3))])
def test_what_is_told_is_what_is_read(asks, stand, waits_for, silent):
    standing = Standing(stand=stand, waits_for=waits_for, silent=silent)
    assert decode_state(encode_state(standing, asks=asks)) == (standing, asks)


def test_long_lists_are_cut_to_fit_a_datagram():
    standing = Standing(stand=Stand.WAITING, waits_for=tuple(range(1000)), silent=tuple(range(1000)))
    payload = encode_state(standing, asks=True)
    assert len(payload) < 576 - 48
    decoded = decode_state(payload)
    assert decoded is not None and decoded[0].waits_for == decoded[0].silent == tuple(range(MOST_RANKS))


def test_garbage_is_none_or_a_standing():
    rng = np.random.default_rng(0)
    found = [decode_state(rng.bytes(length)) for length in range(40) for _ in range(50)]
    assert found.count(None) > len(found) // 2
    good = encode_state(Standing(stand=Stand.WAITING, waits_for=(1, 2)), asks=True)
    assert all(decode_state(good[:length]) is None for length in range(len(good)))
    assert decode_state(good + b"\0") is None


def standing(*ranks: int) -> Standing:
    return Standing(stand=Stand.WAITING, waits_for=ranks)


def begin(book: RoundBook, key: int, *ranks: int) -> None:
    book.begin(key, b"", repr, lambda: standing(*ranks))


def test_a_book_knows_how_the_rank_stands_with_any_round():
    book = RoundBook()
    assert book.standing(KEY) == Standing(stand=Stand.NOT_CALLED)
    begin(book, KEY, 4)
    assert book.standing(KEY) == standing(4)
    begin(book, KEY + 1, 2)
    assert book.standing(KEY + 2) == Standing(stand=Stand.NOT_CALLED, waits_for=(2, 4))
    book.end(KEY)
    assert book.standing(KEY) == Standing(stand=Stand.OVER)


def test_transfers_have_no_standing_and_stand_in_nobodys_way():
    book = RoundBook()
    book.begin(ANY_ORDER_BIT << 32, b"", repr)
    assert book.standing(KEY) == Standing(stand=Stand.NOT_CALLED)


def test_who_waits_in_several_rounds_tells_of_all():
    found = not_called([standing(3, 1), Standing(stand=Stand.WAITING, waits_for=(1,), silent=(9,))])
    assert found == Standing(stand=Stand.NOT_CALLED, waits_for=(1, 3), silent=(9,))
