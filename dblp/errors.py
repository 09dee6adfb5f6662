"""Errors: one small hierarchy; each error says what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DblpError(Exception):
    """Root of all errors that dblp raises."""

    code = "dblp"


class LocalError(DblpError):
    """This process used dblp wrongly or lacks something; no peer is at fault."""

    code = "local"


class ConfigError(LocalError, ValueError):
    """A configuration value, policy or impairment string is not usable."""

    code = "config"


class UnsupportedError(LocalError, TypeError):
    """The call asks for what the contract forbids (a loss policy on integers, MIN of complex numbers)."""

    code = "unsupported"


class ClosedError(LocalError):
    """The group or endpoint was closed or had failed before this call."""

    code = "closed"


class RemoteError(DblpError):
    """A peer is at fault, or two ranks disagree. ``ranks`` names them."""

    code = "remote"

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class MismatchError(RemoteError):
    """Ranks called different collectives, or one with different sizes, dtypes or operations."""

    code = "mismatch"


class VersionError(RemoteError):
    """A peer speaks another major version of the protocol."""

    code = "version"


class HandshakeError(RemoteError):
    """The rendezvous failed: unreachable master, wrong world size, rank taken, foreign job on the port."""

    code = "handshake"


class PeerError(RemoteError):
    """A peer failed, closed or gave up, and told us so."""

    code = "peer"


class DeadlineError(RemoteError, TimeoutError):
    """A round passed its deadline. ``ranks`` are those that are missing."""

    code = "deadline"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's text: ``; did you mean 'cnn'?``, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
