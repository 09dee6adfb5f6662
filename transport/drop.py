"""Why datagrams are dropped: each is counted with its reason (C7 of the contract)."""

from __future__ import annotations

import enum


class Drop(enum.Enum):
    """Why a datagram changed nothing."""

    SHORT = "shorter than a header"
    VERSION = "another protocol version"
    SESSION = "another session"
    RANK = "no such rank, or our own"
    TYPE = "unknown type"
    NOT_CONNECTED = "handshake not finished"
    LENGTH = "length contradicts the header"
    CHUNK = "chunk index out of range"
    PAYLOAD = "control payload not decodable"
    DUPLICATE = "chunk was here before"
    LATE = "message is over"
    EARLY_FULL = "receive not posted and the early pool is full"
    COOKIE = "wrong handshake cookie"
    HANDSHAKE = "handshake datagram that fits no attempt of ours"
