"""Why a group fails, in words: what ABORT carries to the peers, and calls that disagree."""

from __future__ import annotations

import msgpack

from dblp.errors import DblpError, DeadlineError, MismatchError, PeerError
from dblp.transport import wire
from dblp.transport.message import ROUND_BITS, MessageSpec, round_of
from dblp.transport.rounds import Round, is_collective, round_name


def call_mismatch(round_: Round, opened: wire.Open, rank: int, peer: int) -> MismatchError:
    """The peer's signature of the round is another than that of ``rank``, ours."""
    mine = round_.describe(round_.signature)
    try:
        theirs = round_.describe(opened.signature)
    except Exception:  # a peer's bytes may be anything
        theirs = "something that this version cannot read"
    return MismatchError(
        f"{_round_in_words(round_.key)}: rank {rank} called {mine}, but rank {peer} called {theirs}; all ranks of a "
        "group must call the same collectives in the same order with the same sizes, dtypes, operations and policies",
        [rank, peer],
    )


def size_mismatch(theirs: MessageSpec, mine: MessageSpec, rank: int, peer: int) -> MismatchError:
    """A message is another than the receive that was posted for it."""
    what = (
        f"{theirs.nbytes} bytes where rank {rank} expects {mine.nbytes}"
        if theirs.nbytes != mine.nbytes
        else f"a message as {theirs} where rank {rank} expects {mine}"
    )
    return MismatchError(f"rank {peer} sends {what}", [rank, peer])


def left_in_round(peer: int, rank: int, message: int) -> PeerError:
    """A peer closed its group, and ``message`` of a round with ``rank``, ours, is not over."""
    what = _round_in_words(round_of(message))
    return PeerError(
        f"rank {peer} closed its group while rank {rank} was still in a round with it: {what}. {_WHY_LEFT}",
        [peer],
    )


def left_before(peer: int, rank: int, message: int) -> PeerError:
    """A peer closed its group, and ``message`` of a round with ``rank``, ours, cannot begin, or does not come."""
    what = _round_in_words(round_of(message))
    return PeerError(
        f"rank {peer} has closed its group: nothing more comes from it to rank {rank}, nor goes to it, as {what} needs. "
        f"{_WHY_LEFT}",
        [peer],
    )


_WHY_LEFT = (
    "It made fewer calls than this rank, or left after an error of its own, which its output tells; to go on, abort or destroy "
    "this group and make a new one"
)


def _round_in_words(key: int) -> str:
    group, _, number = round_name(key >> ROUND_BITS, key & (1 << ROUND_BITS) - 1).partition(":")
    return f"{f'round {number}' if is_collective(key) else 'a transfer'} of group {group}"


def encode_abort(error: Exception) -> bytes:
    """ABORT's payload (``wire.ABORT_KEYS``)."""
    code = error.code if isinstance(error, DblpError) else "dblp"
    ranks = list(getattr(error, "ranks", ()))[:64]
    packed: bytes = msgpack.packb({"code": code, "text": str(error)[:300], "ranks": ranks})
    return packed


def decode_abort(peer: int, payload: bytes) -> DblpError:
    """The error that ``peer`` gave up with, whatever its bytes are."""
    try:
        body = msgpack.unpackb(payload)
        code, text, ranks = str(body["code"]), str(body["text"]), [int(rank) for rank in body["ranks"]]
    except Exception:  # msgpack raises many kinds on garbage
        code, text, ranks = "dblp", "it did not say why", []
    kind = {"deadline": DeadlineError, "mismatch": MismatchError}.get(code, PeerError)
    return kind(f"rank {peer} gave up: {text}", ranks or [peer])
