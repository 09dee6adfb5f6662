"""Configuration of the transport: one frozen dataclass, and the same fields as ``DBLP_*`` environment variables."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any

from dblp.errors import ConfigError
from dblp.transport.fields import check_fields
from dblp.units import MIB, check_timeout, parse_bps, parse_bytes, parse_cpus, parse_seconds

HEADER_BYTES = 48
"""Bytes of header in each datagram; docs/wire.md has the table."""
CHUNK_ALIGN_BYTES = 16
"""Chunks are a multiple of the largest element (complex128), so that no element is cut."""
ETHERNET_DATAGRAM_BYTES = 1464
"""Largest datagram of a group by default: an MTU of 1500 less IPv4 and UDP headers and room for one VLAN tag."""
MAX_DATAGRAM_BYTES = 65_507
"""Largest UDP payload over IPv4 (RFC 768, RFC 791)."""
MAX_PATHS = 64
"""The path id is one byte; feedback, sockets and polling cost grow with it."""

OTHER_VARIABLES = frozenset({"DBLP_JOB", "DBLP_NETEM_RUNNER"})
"""Variables that are no field of ``TransportConfig``: the job's name, which ``dblp.init_process_group`` reads, and the command
with which the tests boot a kernel that has netem."""
_PREFIX = "DBLP_"
_log = logging.getLogger("dblp")
_warned: set[str] = set()
"""Unknown variables that this process has spoken of."""

LOSSY, ALWAYS = "lossy", "always"
BY_VALUE = (LOSSY, ALWAYS)
EVIDENCE, PASSES = "evidence", "passes"
REPAIRS = (EVIDENCE, PASSES)
AUTO_CPUS, ALL_CPUS = "auto", "all"
MOST_BUFFER_BYTES = 1 << 30
"""Most that a socket's buffer can be asked for: the kernel doubles the figure, in an int."""
MOST_SWITCH_INTERVAL_S = 1.0
"""Beyond it a waiting thread would never get the interpreter."""
MAX_COPIES = 16
"""Of 90 % loss, 16 copies leave 19 %: more are not worth their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Settings of one endpoint. The defaults suit 1 to 25 Gb/s Ethernet and Linux's own socket limits."""

    timeout_s: float = 300.0
    """Seconds that a round may take before it raises DeadlineError on every survivor. Groups of torch.distributed have their own
    timeout, 30 minutes by default: there the variable counts where none is passed."""
    connect_timeout_s: float = 60.0
    """Seconds that the rendezvous and the handshakes may take."""
    datagram_bytes: int = ETHERNET_DATAGRAM_BYTES
    """Largest UDP payload; the group agrees on the least of all ranks and of their interfaces. 8952 for jumbo frames."""
    paths: int = 1
    """Local ports, each an ECMP entropy of its own; each costs a socket and its buffers."""
    path_choice: str = "spray"
    """Which of several paths a burst takes, by name: ``spray`` (in turn), ``random``, ``reps`` (those that acknowledged cleanly
    are used again), ``ethereal`` (one path a message, as few of them split as it takes to load all equally) or ``single`` (one
    path a peer, never another)."""
    path_chunks: int = 0
    """Chunks that leave together on one path before the next choice; 1 sprays each datagram, 0: bursts and trains such that each
    path carries an equal share of the message."""
    leaf_ranks: int = 1
    """For ``path_choice="ethereal"``: so many ranks in a row are behind one leaf switch, and messages to them share its paths."""
    receive_buffer_bytes: int = 4 * MIB
    """SO_RCVBUF asked for on each path; the kernel clamps it to net.core.rmem_max. Credit is sized by what it gives."""
    send_buffer_bytes: int = 4 * MIB
    """SO_SNDBUF asked for on each path; clamped to net.core.wmem_max."""
    early_bytes: int = 1 * MIB
    """Bytes of a message that a peer may send before its receive is posted; the most that is held for each peer."""
    window_bytes: int = 16 * MIB
    """Memory for staged contributions of one exact round, over all peers."""
    congestion: str = "delay"
    """Congestion control by name: ``delay`` (round trips), ``bbr`` (bandwidth and least round trip), ``dctcp`` (switches mark;
    all ranks must use it) or ``fixed`` (a rate)."""
    rate_bps: float = 0.0
    """Sending rate of a rank for ``congestion="fixed"``, bits per second; 0 is unpaced."""
    copies: int = 8
    """Most copies of a chunk that leave in one go while a path loses more than a tenth of what it takes: as many as the loss
    calls for and the window has room for. 1: none, each waits for the answer to the one before."""
    repair: str = "evidence"
    """When a lost chunk of a bounded message goes again, by name: ``evidence`` (as soon as a later arrival says that it is lost,
    and as many as the bound needs) or ``passes`` (MLT's and DBLP's probe and bitmap: all that is missing, once all that has left
    is known to have arrived or not)."""
    by_value: str = LOSSY
    """When chunks with tags leave in the order of their value, each class under its own DSCP, by name: ``lossy`` (on a path that
    has lost a quarter of what the message may lose within ten seconds, and wherever the last to leave are left behind; elsewhere
    only the critical ones come first, which takes a quarter less time) or ``always`` (for switches that look at DSCP)."""
    ifname: str = ""
    """Interface or address to use; empty: the one on the route to the master. Of several, ``eth0,eth1``, the paths take turns:
    path i of one rank meets path i of another, so list them in the same order everywhere."""
    impair: str = ""
    """Impairments of what this rank sends, as one string (docs/impairments.md); empty: none."""
    flight_rounds: int = 64
    """Rounds of each group that its flight recorder keeps (docs/reliability.md); 0: none."""
    flight_dir: str = ""
    """Folder for the flight recorder's text and JSON when a group fails or a signal asks; empty: what did not end well goes to
    the log, as text."""
    flight_signal: str = ""
    """Signal that dumps the flight recorders of the process, such as ``SIGUSR1``; empty: none."""
    seed: int = 0
    """Seed of the endpoint's random choices."""
    switch_interval_s: float = 50e-6
    """``sys.setswitchinterval`` while the engine runs, so that a busy main thread yields soon; 0 leaves it alone."""
    engine_cpus: str = AUTO_CPUS
    """Processors that the engine's thread keeps to: ``auto`` (an equal share of its process's, for each rank of the host that may
    use the same ones; one in turn where there are fewer), ``all`` (the scheduler's choice) or a list such as ``0-3,8``."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("timeout_s", "connect_timeout_s"):
            check_timeout(name, getattr(self, name))
        if not 512 <= self.datagram_bytes <= MAX_DATAGRAM_BYTES:
            raise ConfigError(f"datagram_bytes={self.datagram_bytes}: must lie in 512..{MAX_DATAGRAM_BYTES}")
        if not 1 <= self.paths <= MAX_PATHS:
            raise ConfigError(f"paths={self.paths}: must lie in 1..{MAX_PATHS}")
        if not 1 <= self.copies <= MAX_COPIES:
            raise ConfigError(f"copies={self.copies}: must lie in 1..{MAX_COPIES}")
        if self.path_chunks < 0 or self.leaf_ranks < 1:
            raise ConfigError("path_chunks must not be negative, leaf_ranks at least 1")
        _check_path_choice(self.path_choice)
        _check_congestion(self.congestion)
        if self.repair not in REPAIRS:
            raise ConfigError(f"repair={self.repair!r}: known are {', '.join(map(repr, REPAIRS))}")
        if self.by_value not in BY_VALUE:
            raise ConfigError(f"by_value={self.by_value!r}: known are {', '.join(map(repr, BY_VALUE))}")
        for name in ("receive_buffer_bytes", "send_buffer_bytes", "early_bytes", "window_bytes"):
            if getattr(self, name) < 65_536:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 64 KiB are needed")
        for name in ("receive_buffer_bytes", "send_buffer_bytes"):
            if getattr(self, name) > MOST_BUFFER_BYTES:
                raise ConfigError(f"{name}={getattr(self, name)}: a socket's buffer has at most 1 GiB")
        for name in ("rate_bps", "switch_interval_s", "seed", "flight_rounds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must not be negative")
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: a finite number is needed")
        if self.switch_interval_s > MOST_SWITCH_INTERVAL_S:
            raise ConfigError(
                f"switch_interval_s={self.switch_interval_s:g}: at most {MOST_SWITCH_INTERVAL_S:g} seconds"
            )
        if self.engine_cpus not in (AUTO_CPUS, ALL_CPUS):
            try:
                parse_cpus(self.engine_cpus)
            except ConfigError as error:
                raise ConfigError(f"engine_cpus={error}, nor {AUTO_CPUS!r} or {ALL_CPUS!r}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> TransportConfig:
        """Read ``DBLP_<FIELD>`` variables (``DBLP_TIMEOUT_S=30``, ``DBLP_DATAGRAM_BYTES=8952``); ``overrides`` win.

        Raises ConfigError that names the variable, or the field, for an unusable value. A ``DBLP_`` variable that nothing reads
        is most likely a slip: a warning names it, once a process.
        """
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for spec in fields(cls):
            variable = _variable(spec.name)
            if env.get(variable, "") != "":
                values[spec.name] = _read(variable, env[variable], spec.name, spec.default)
        values.update(overrides)
        _warn_of_unknown(env, {_variable(spec.name) for spec in fields(cls)} | OTHER_VARIABLES)
        return cls(**values)


def _variable(field: str) -> str:
    return f"{_PREFIX}{field.upper()}"


def _warn_of_unknown(env: Mapping[str, str], known: Set[str]) -> None:
    for name in sorted(name for name in env if name.startswith(_PREFIX)):
        if name in known or name in _warned:
            continue
        _warned.add(name)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        _log.warning("%s=%s is set, but nothing reads it: did you mean %s?", name, env[name], near)


def _check_congestion(name: str) -> None:
    from dblp.transport.congestion import (
        REGISTRY,
    )  # the controls are made from a configuration: they import this module

    if name not in REGISTRY:
        raise ConfigError(f"congestion={name!r}: known are {', '.join(map(repr, REGISTRY))}")


def _check_path_choice(name: str) -> None:
    from dblp.transport.paths import (
        REGISTRY,
    )  # the choices are made from a configuration: they import this module

    if name not in REGISTRY:
        raise ConfigError(f"path_choice={name!r}: known are {', '.join(map(repr, REGISTRY))}")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number is needed") from None


def _read(variable: str, text: str, name: str, default: Any) -> Any:
    convert: Callable[[str], Any] = str
    if name.endswith("_s"):
        convert = parse_seconds
    elif name.endswith("_bytes"):
        convert = parse_bytes
    elif name.endswith("_bps"):
        convert = parse_bps
    elif isinstance(default, int):
        convert = _whole
    try:
        return convert(text)
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r}: {error}") from None
