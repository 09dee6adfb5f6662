"""Handshake of two ranks on each path: HELLO, RETRY with a cookie, HELLO again, WELCOME.

The higher rank begins. The lower one answers a HELLO with a stateless cookie bound to the source address and the nonce, never
longer than the HELLO, and holds state only for a HELLO that brings it back: addresses are proved both ways (RFC 9000, section 8,
in spirit). Payloads are msgpack maps; unknown keys are ignored, another major version is an error on both sides.

A path that is dead from the start must not hold up the group: ``GRACE_S`` after every peer has answered on one path, those
that did on another are ``ready``. HELLOs go on, so that the path joins when it comes to life.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from dblp.errors import DblpError, HandshakeError, PeerError, VersionError
from dblp.transport import wire
from dblp.transport.abort import decode_abort
from dblp.transport.config import HEADER_BYTES
from dblp.transport.port import Address
from dblp.transport.wire import Type

HELLO_BYTES = 400
"""HELLOs are padded to this payload, so that no answer is longer than what asked for it."""
COOKIE_BYTES = 16
RETRY_S = 0.05
"""First distance between HELLOs; it doubles up to ``MAX_RETRY_S``."""
MAX_RETRY_S = 0.5
GRACE_S = 1.0
"""Time that slower paths of a peer get: five HELLOs, of which one in twenty loses all to a loss of 20 % on each way."""
MINOR_VERSION = 0
KEYS = {
    "nonce": "HELLO, RETRY, WELCOME: 8 random bytes of the rank that began, on this path",
    "cookie": "HELLO: empty at first, then what RETRY brought; RETRY: 16 bytes",
    "pad": "HELLO: zeros",
    "rank": "HELLO, WELCOME: as in the header",
    "world_size": "HELLO, WELCOME: ranks of the job; must be equal",
    "generation": "HELLO, WELCOME: of the job, after restarts; must be equal",
    "paths": "HELLO, WELCOME: number of paths; must be equal",
    "datagram_bytes": "HELLO, WELCOME: largest datagram of the group; must be equal",
    "window_bytes": "HELLO, WELCOME: credit to begin with",
    "minor": "HELLO, WELCOME: minor version; may differ",
    "byteorder": "HELLO, WELCOME: of the payloads, `little`; must be equal",
    "why": "REFUSE: text",
}
"""Keys of the payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a rank says of itself."""

    rank: int
    world_size: int
    generation: int
    paths: int
    datagram_bytes: int
    window_bytes: int

    def to_map(self) -> dict[str, Any]:
        """As a msgpack map."""
        return {
            "rank": self.rank, "world_size": self.world_size, "generation": self.generation, "paths": self.paths,
            "datagram_bytes": self.datagram_bytes, "window_bytes": self.window_bytes,
            "minor": MINOR_VERSION, "byteorder": sys.byteorder,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """A handshake datagram to send: no state of the sender is touched by it."""

    type: Type
    path: int
    address: Address
    payload: bytes


class _Attempt:
    """An initiator's state for one path to one peer."""

    __slots__ = ("address", "cookie", "gap", "next_at", "nonce")

    def __init__(self, address: Address, nonce: bytes, now: float) -> None:
        self.address = address
        self.nonce = nonce
        self.cookie = b""
        self.next_at = now
        self.gap = RETRY_S


class Handshake:
    """All handshakes of one rank."""

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[Sequence[Address]],
        *,
        secret: bytes,
        nonces: Sequence[bytes],
        now: float,
    ) -> None:
        self.identity = identity
        self.proved: set[tuple[int, int]] = set()
        self.addresses: dict[tuple[int, int], Address] = {}
        self.windows: dict[int, int] = {}
        self.error: DblpError | None = None
        self.bad_cookies = 0
        self.ignored = 0
        self._grace_at = float("inf")
        self._grace_over = False
        self._secret = secret
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._welcomes: dict[tuple[int, int], Reply] = {}
        for peer, paths in enumerate(addresses):
            if peer < identity.rank:
                for path, address in enumerate(paths[: identity.paths]):
                    self._attempts[peer, path] = _Attempt(address, nonces[len(self._attempts)], now)

    def missing(self) -> list[int]:
        """Peers without a path that is proved."""
        heard = {peer for peer, _ in self.proved}
        return [
            peer
            for peer in range(self.identity.world_size)
            if peer != self.identity.rank and peer not in heard
        ]

    def unproved(self) -> list[tuple[int, int]]:
        """(peer, path) of the paths that are not proved."""
        every = (
            (peer, path) for peer in range(self.identity.world_size) for path in range(self.identity.paths)
        )
        return [pair for pair in every if pair[0] != self.identity.rank and pair not in self.proved]

    @property
    def ready(self) -> bool:
        """All paths are proved, or one to each peer and the time of grace is over."""
        return not self.missing() and (self._grace_over or not self.unproved())

    def next_timeout(self) -> float:
        """When a HELLO is due, or the time of grace is over."""
        if not self._attempts:  # for all but the first moments
            return self._grace_at
        return min(self._grace_at, *(attempt.next_at for attempt in self._attempts.values()))

    def on_timer(self, now: float) -> list[Reply]:
        """The time of grace, and HELLOs that are due."""
        if self._grace_at <= now:
            self._grace_at, self._grace_over = float("inf"), True
        return self.hellos(now)

    def hellos(self, now: float) -> list[Reply]:
        """HELLOs that are due."""
        due = []
        for (_, path), attempt in self._attempts.items():
            if attempt.next_at <= now:
                attempt.next_at = now + attempt.gap
                attempt.gap = min(2 * attempt.gap, MAX_RETRY_S)
                due.append(Reply(Type.HELLO, path, attempt.address, self._hello(attempt)))
        return due

    def welcomes(self, peers: Collection[int]) -> list[Reply]:
        """What ``peers`` were answered last, to be said again: it may have been lost."""
        return [reply for (peer, _), reply in self._welcomes.items() if peer in peers]

    def on_datagram(self, header: wire.Header, payload: bytes, source: Address, now: float) -> list[Reply]:
        """A handshake datagram of our session came; returns what to answer. ``error`` is set if it ends the matter.

        CLOSE and ABORT of a peer that has no path yet end the matter, too. What is not decodable, too short, or fits no attempt
        of ours (late repeats do that) is ``ignored`` and counted.
        """
        peer, path = header.rank, header.path
        if header.type in (Type.CLOSE, Type.ABORT):
            self._on_farewell(peer, header.type, payload)
            return []
        try:
            body = msgpack.unpackb(payload)
        except Exception:  # msgpack raises many kinds on garbage
            body = None
        if not isinstance(body, dict):
            self.ignored += 1
            return []
        if header.type == Type.HELLO:
            if len(payload) < HELLO_BYTES or peer <= self.identity.rank:
                self.ignored += 1
                return []
            return self._on_hello(peer, path, body, source, now)
        attempt = self._attempts.get((peer, path))
        if attempt is None:
            self.ignored += 1
        elif header.type == Type.RETRY:
            return self._on_retry(attempt, body, now)
        elif header.type == Type.WELCOME:
            self._on_welcome(peer, path, body, now)
        else:
            self.error = HandshakeError(
                f"rank {peer} at {source.host}:{source.port} refused: {str(body.get('why'))[:300]}", [peer]
            )
        return []

    def on_other_version(
        self, version: int, header_type: int, peer: int, path: int, source: Address, size: int
    ) -> list[Reply]:
        """A datagram of our session, ``size`` bytes, came that speaks another major version."""
        self.error = VersionError(
            f"rank {peer} at {source.host}:{source.port} speaks version {version} of the dblp protocol, "
            f"this rank ({self.identity.rank}) version {wire.VERSION}: install the same dblp on all hosts",
            [peer],
        )
        if header_type != Type.HELLO:
            return []
        why = msgpack.packb({"why": f"it speaks version {wire.VERSION} of the dblp protocol, not {version}"})
        if HEADER_BYTES + len(why) > size:  # its address is not proved
            return []
        return [Reply(Type.REFUSE, path, source, why)]

    def _hello(self, attempt: _Attempt) -> bytes:
        body = self.identity.to_map() | {"nonce": attempt.nonce, "cookie": attempt.cookie}
        body["pad"] = b""
        short = HELLO_BYTES - len(msgpack.packb(body))
        body["pad"] = bytes(max(0, short))
        packed: bytes = msgpack.packb(body)
        return packed

    def _cookie(self, source: Address, nonce: bytes) -> bytes:
        text = f"{source.host}|{source.port}|".encode() + nonce
        return hmac.new(self._secret, text, hashlib.sha256).digest()[:COOKIE_BYTES]

    def _on_hello(
        self, peer: int, path: int, body: dict[str, Any], source: Address, now: float
    ) -> list[Reply]:
        nonce, cookie = body.get("nonce"), body.get("cookie")
        if not isinstance(nonce, bytes) or not isinstance(cookie, bytes) or len(nonce) > COOKIE_BYTES:
            self.ignored += 1
            return []
        expected = self._cookie(source, nonce)
        if not hmac.compare_digest(cookie, expected):
            self.bad_cookies += bool(cookie)
            return [Reply(Type.RETRY, path, source, msgpack.packb({"nonce": nonce, "cookie": expected}))]
        why = self._disagreement(peer, path, body)
        if why:
            self.error = HandshakeError(
                f"rank {peer} at {source.host}:{source.port} does not fit: {why}", [peer]
            )
            return [Reply(Type.REFUSE, path, source, msgpack.packb({"why": why}))]
        self._prove(peer, path, body, source, now)
        welcome = Reply(Type.WELCOME, path, source, msgpack.packb(self.identity.to_map() | {"nonce": nonce}))
        self._welcomes[peer, path] = welcome
        return [welcome]

    def _on_farewell(self, peer: int, type_: int, payload: bytes) -> None:
        """The peer leaves, or gives up. Once it has a path the group hears of that there."""
        if peer not in self.missing() or self.error is not None:
            self.ignored += 1
        elif type_ == Type.ABORT:
            self.error = decode_abort(peer, payload)
        else:
            self.error = PeerError(
                f"rank {peer} left before rank {self.identity.rank} had finished its handshake with it: its process has ended, "
                "or destroyed the group; its output tells why",
                [peer],
            )

    def _disagreement(self, peer: int, path: int, body: dict[str, Any]) -> str:
        mine, theirs = self.identity.to_map(), body
        for name in ("world_size", "generation", "paths", "datagram_bytes", "byteorder"):
            if theirs.get(name) != mine[name]:
                value = repr(theirs.get(name))[:40]
                return f"{name} is {value} on rank {peer} and {mine[name]!r} on rank {self.identity.rank}"
        if not 0 <= path < self.identity.paths or theirs.get("rank") != peer:
            return f"path {path} or rank {str(theirs.get('rank'))[:40]} contradicts the header"
        return ""

    def _on_retry(self, attempt: _Attempt, body: dict[str, Any], now: float) -> list[Reply]:
        cookie = body.get("cookie")
        if body.get("nonce") != attempt.nonce or not isinstance(cookie, bytes) or len(cookie) > COOKIE_BYTES:
            self.ignored += 1
            return []
        attempt.cookie = cookie
        attempt.next_at = now
        return self.hellos(now)

    def _on_welcome(self, peer: int, path: int, body: dict[str, Any], now: float) -> None:
        attempt = self._attempts[peer, path]
        if body.get("nonce") != attempt.nonce:
            self.ignored += 1
            return
        why = self._disagreement(peer, path, body)
        if why:
            self.error = HandshakeError(f"rank {peer} does not fit: {why}", [peer])
            return
        self._prove(peer, path, body, attempt.address, now)
        del self._attempts[peer, path]

    def _prove(self, peer: int, path: int, body: dict[str, Any], address: Address, now: float) -> None:
        self.proved.add((peer, path))
        unset = self._grace_at == float("inf") and not self._grace_over
        if unset and self.unproved() and not self.missing():
            self._grace_at = now + GRACE_S
        self.addresses[peer, path] = address
        window = body.get("window_bytes")
        self.windows[peer] = window if isinstance(window, int) and window > 0 else 65_536
