"""The functions of ``import dblp``: torch.distributed's, on tensors and numpy arrays, without
torch.distributed.

One default group a process. Calls are synchronous and return the round's ``Report``; with ``async_op=True``
they return a ``Handle``. Tensors are recognised by their type's module: without one torch is not imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np

from dblp.collectives.carry import Residual
from dblp.collectives.engine import Engine
from dblp.collectives.group import Group
from dblp.collectives.master import MasterRendezvous
from dblp.collectives.p2p import MAX_RANKS
from dblp.collectives.recorder import FlightRecorder
from dblp.collectives.rendezvous import Member, Roster
from dblp.collectives.report import Report
from dblp.collectives.session import BACKSTOP_SECONDS, Session
from dblp.errors import ClosedError, ConfigError, DeadlineError, UnsupportedError
from dblp.transport.config import TransportConfig
from dblp.transport.fields import is_whole
from dblp.transport.policy import Policy
from dblp.transport.port import Address
from dblp.units import check_timeout

T = TypeVar("T")
ArrayLike = Any
"""A numpy array or a torch tensor."""
ArrayLikes = Any
"""One of them, cut evenly among the ranks, or a list of one for each rank."""
WAIT_SLICE_S = 0.5
"""Longest sleep of a wait."""
MOST_PORT = 65_535


class Handle(Generic[T]):
    """A call in flight. The arrays must be left alone until ``wait`` has returned; results are in place
    then."""

    def __init__(self, what: str, timeout_s: float, restores: Sequence[Callable[[], None]]) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._restores = restores
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True once it has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the end and return the Report (for ``recv``: the source's rank); raises the call's error.

        ``timeout_s``: seconds to wait here; beyond it DeadlineError is raised and the call goes on.
        """
        limit = (
            self._timeout_s + 2 * BACKSTOP_SECONDS
            if timeout_s is None
            else check_timeout("timeout_s", timeout_s)
        )
        if not self._waited(limit):
            raise DeadlineError(
                f"{self._what}: not done within {limit:g} s of wait(); it goes on, and ends by its own timeout of "
                f"{self._timeout_s:g} s: call wait() again, or give it more time (timeout_s)"
            )
        if self._error is not None:
            raise self._error
        restores, self._restores = self._restores, ()
        for restore in restores:
            restore()
        return cast(T, self._result)

    def _waited(self, seconds: float) -> bool:
        """Wait for the end, in slices: a process that was stopped meanwhile has not waited."""
        while seconds > 0:
            if self._ended.wait(min(seconds, WAIT_SLICE_S)):
                return True
            seconds -= WAIT_SLICE_S
        return self._ended.is_set()

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._ended.set()


class _Default:
    """The process's default group."""

    session: Session | None = None
    generation = 0


def init_process_group(
    *,
    master_addr: str | None = None,
    master_port: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    config: TransportConfig | None = None,
) -> None:
    """Join the default group of this process; blocks until all ranks have come.

    What is not given is taken from MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, DBLP_JOB and the DBLP_*
    variables of ``TransportConfig``. ``job`` tells apart jobs that meet on one port by mistake. Raises
    ConfigError for what is missing or unusable, HandshakeError, VersionError, DeadlineError (see
    ``MasterRendezvous.join``).
    """
    if _Default.session is not None:
        raise ConfigError("the default group exists already; call dblp.destroy_process_group() first")
    environ = os.environ
    if config is not None and not isinstance(config, TransportConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}: a dblp.TransportConfig is needed, such as TransportConfig(timeout_s=30)"
        )
    for name, text in (("master_addr", master_addr), ("job", job)):
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{name}={text!r}: a text is needed, not {type(text).__name__}")
    place = Address(
        master_addr if master_addr is not None else _text(environ, "MASTER_ADDR", "master_addr"),
        _whole("master_port", master_port, environ, "MASTER_PORT"),
    )
    if not 1 <= place.port <= MOST_PORT:
        raise ConfigError(
            f"master_port={place.port}: a port of 1..{MOST_PORT} is needed, the same on all ranks"
        )
    rank = _whole("rank", rank, environ, "RANK")
    world_size = _whole("world_size", world_size, environ, "WORLD_SIZE")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: at least 1 is needed")
    if world_size > MAX_RANKS:
        raise ConfigError(f"world_size={world_size}: at most {MAX_RANKS} ranks are supported")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank} with world_size={world_size}: the rank must lie in 0..{world_size - 1}"
        )
    config = config if config is not None else TransportConfig.from_env()
    job = job if job is not None else environ.get("DBLP_JOB", "")
    _Default.generation += 1
    rendezvous = MasterRendezvous(place, job=job, timeout_s=config.connect_timeout_s)
    meet = _meet_at(rendezvous, _Default.generation)
    _Default.session = Session(
        config, meet, rank=rank, world_size=world_size, master=place, cleanup=rendezvous.close
    )


def destroy_process_group() -> None:
    """Leave the default group; lingers until what was sent is acknowledged. Without a group it does
    nothing."""
    session, _Default.session = _Default.session, None
    if session is not None:
        session.close()


def is_initialized() -> bool:
    """True between ``init_process_group`` and ``destroy_process_group``."""
    return _Default.session is not None


def get_rank() -> int:
    """This process's rank in the default group; raises ClosedError without one."""
    return _session().rank


def get_world_size() -> int:
    """Ranks of the default group; raises ClosedError without one."""
    return _session().world_size


def flight_recorder() -> FlightRecorder:
    """The last rounds of the default group, as text or JSON; raises ClosedError without one."""
    return _session().group.flight_recorder


# Reducing


def all_reduce(
    x: ArrayLike,
    op: str = "sum",
    policy: Policy | None = None,
    *,
    algorithm: str = "auto",
    carry: Residual | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduce ``x`` over all ranks, in place. A ``policy`` may let a floating sum or average lose chunks; ``carry`` keeps
    what was lost of this rank's part for the next call with it (see ``Group.all_reduce``). Raises what that raises, ConfigError
    for a ``carry`` that is no Residual, and UnsupportedError for a policy with ``hadamard``."""
    _check_policy(policy)
    if carry is not None and not isinstance(carry, Residual):
        raise ConfigError(
            f"carry={carry!r}: a Residual(x.size) of dblp.collectives.carry is needed, kept from call to call; how it is bounded "
            "says the policy's own carry="
        )
    item = _stage(x, arithmetic=True)

    def call(group: Group) -> Awaitable[Report]:
        return group.all_reduce(
            item.array,
            op,
            policy=policy,
            algorithm=algorithm,
            carry=carry,
            timeout_s=timeout_s,
            dtype=item.dtype,
        )

    return _run("all_reduce", call, [item], async_op, timeout_s)


def reduce_scatter(
    output: ArrayLike,
    input: ArrayLikes,
    op: str = "sum",
    policy: Policy | None = None,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduce each rank's part of ``input`` over all ranks into that rank's ``output``. Raises UnsupportedError for a policy with
    ``hadamard``."""
    _check_policy(policy)
    target, sources = _stage(output, arithmetic=True), _stage_parts(input, arithmetic=True)

    def call(group: Group) -> Awaitable[Report]:
        return group.reduce_scatter(
            target.array, sources.arrays, op, policy=policy, timeout_s=timeout_s, dtype=target.dtype
        )

    return _run("reduce_scatter", call, [target], async_op, timeout_s)


def reduce(
    x: ArrayLike, root: int = 0, op: str = "sum", *, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Reduce ``x`` over all ranks into that of ``root``; the others keep theirs."""
    item = _stage(x, arithmetic=True)

    def call(group: Group) -> Awaitable[Report]:
        return group.reduce(item.array, root, op, timeout_s=timeout_s, dtype=item.dtype)

    return _run("reduce", call, [item], async_op, timeout_s)


# Moving


def all_gather(
    output: ArrayLikes, input: ArrayLike, *, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Collect every rank's ``input`` in every rank's ``output``."""
    targets, source = _stage_parts(output), _stage(input)

    def call(group: Group) -> Awaitable[Report]:
        return group.all_gather(targets.arrays, source.array, timeout_s=timeout_s)

    return _run("all_gather", call, [targets], async_op, timeout_s)


def broadcast(x: ArrayLike, root: int = 0, *, async_op: bool = False, timeout_s: float | None = None) -> Any:
    """Give every rank the ``x`` of ``root``."""
    item = _stage(x)

    def call(group: Group) -> Awaitable[Report]:
        return group.broadcast(item.array, root, timeout_s=timeout_s)

    return _run("broadcast", call, [item], async_op, timeout_s)


def gather(
    input: ArrayLike,
    output: ArrayLikes | None = None,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Collect every rank's ``input`` in the ``output`` of ``root``; the others pass none."""
    source, targets = _stage(input), _stage_parts(output)

    def call(group: Group) -> Awaitable[Report]:
        return group.gather(targets.arrays, source.array, root, timeout_s=timeout_s)

    return _run("gather", call, [targets], async_op, timeout_s)


def scatter(
    output: ArrayLike,
    input: ArrayLikes | None = None,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Give every rank its part of the ``input`` of ``root``; the others pass none."""
    target, sources = _stage(output), _stage_parts(input)

    def call(group: Group) -> Awaitable[Report]:
        return group.scatter(target.array, sources.arrays, root, timeout_s=timeout_s)

    return _run("scatter", call, [target], async_op, timeout_s)


def all_to_all(
    output: ArrayLikes, input: ArrayLikes, *, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Send part j of ``input`` to rank j, receive rank j's into part j of ``output``."""
    targets, sources = _stage_parts(output), _stage_parts(input)

    def call(group: Group) -> Awaitable[Report]:
        return group.all_to_all(targets.arrays, sources.arrays, timeout_s=timeout_s)

    return _run("all_to_all", call, [targets], async_op, timeout_s)


def barrier(*, async_op: bool = False, timeout_s: float | None = None) -> Any:
    """Wait until every rank has called it."""
    return _run("barrier", lambda group: group.barrier(timeout_s=timeout_s), [], async_op, timeout_s)


# Point to point


def send(
    x: ArrayLike, dst: int, tag: int = 0, *, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Send ``x`` to rank ``dst``."""
    item = _stage(x)

    def call(group: Group) -> Awaitable[int]:
        return group.send(item.array, dst, tag, timeout_s=timeout_s)

    return _run(f"send to rank {dst}", call, [], async_op, timeout_s)


def recv(
    x: ArrayLike,
    src: int | None = None,
    tag: int = 0,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Receive into ``x`` from rank ``src``, or from whoever sends first; returns the source's rank."""
    item = _stage(x)

    def call(group: Group) -> Awaitable[int]:
        return group.recv(item.array, src, tag, timeout_s=timeout_s)

    return _run(
        f"recv from {'any rank' if src is None else f'rank {src}'}", call, [item], async_op, timeout_s
    )


# Inside


class _Array:
    """A numpy array as it is."""

    copied = False

    def __init__(self, array: Any) -> None:
        # ml_dtypes' bfloat16 arrays are no dtype of numpy's own: two bytes an element all the same.
        half = array.dtype.name == "bfloat16"
        self.array = array.view(np.uint16) if half else array
        self.dtype = "bfloat16" if half else None

    def restore(self) -> None:
        """Nothing to do: results are in place."""


class _Parts:
    """One array or a list of arrays, one a rank; None where a rank passes nothing."""

    def __init__(self, items: list[Any] | None, whole: bool) -> None:
        self._items = items or []
        self.arrays: Any = None
        if items is not None:
            self.arrays = items[0].array if whole else [item.array for item in items]

    def restore(self) -> None:
        """Bring results back where they were staged."""
        for item in self._items:
            _restore(item)


def _restore(item: Any) -> None:
    """Bring results back; on a device the caller's stream waits for that."""
    if (arrival := item.restore()) is not None:
        arrival.join()


def _stage(x: ArrayLike, *, arithmetic: bool = False) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedError(
            "a masked array cannot be sent: its mask would be lost; send x.filled(0) or the like"
        )
    if isinstance(x, np.ndarray):
        return _Array(x)
    if type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "__torch_function__"):
        from dblp.collectives.torch.staging import finish_departures
        from dblp.collectives.torch.tensors import stage

        item = stage(x, arithmetic=arithmetic)
        finish_departures()
        return item
    raise UnsupportedError(f"a {type(x).__name__} cannot be sent: a numpy array or a torch tensor is needed")


def _stage_parts(x: ArrayLikes | None, *, arithmetic: bool = False) -> _Parts:
    if x is None:
        return _Parts(None, False)
    if isinstance(x, list | tuple):
        return _Parts([_stage(part, arithmetic=arithmetic) for part in x], False)
    return _Parts([_stage(x, arithmetic=arithmetic)], True)


def _run(
    what: str,
    call: Callable[[Group], Awaitable[Any]],
    results: Sequence[Any],
    async_op: bool,
    timeout_s: float | None,
) -> Any:
    session = _session()
    seconds = session.config.timeout_s if timeout_s is None else check_timeout("timeout_s", timeout_s)
    handle: Handle[Any] = Handle(what, seconds, [partial(_restore, item) for item in results])
    session.submit(what, seconds, call, handle._finish)
    return handle if async_op else handle.wait()


def _session() -> Session:
    if _Default.session is None:
        raise ClosedError(
            "there is no default group; call dblp.init_process_group() first (a group of torch.distributed is another one: what "
            "has it calls torch.distributed's functions)"
        )
    return _Default.session


def _meet_at(
    rendezvous: MasterRendezvous, generation: int
) -> Callable[[Engine, Callable[[int], Member]], Roster]:
    def meet(engine: Engine, member: Callable[[int], Member]) -> Roster:
        return engine.run(lambda: rendezvous.join(member(generation)))

    return meet


def _check_policy(policy: object) -> None:
    if isinstance(policy, Policy) and policy.hadamard:
        raise UnsupportedError(
            "a policy with hadamard=True: dblp.attach rotates gradients, dblp.all_reduce and reduce_scatter do not; use "
            "dataclasses.replace(policy, hadamard=False)"
        )


def _text(environ: Mapping[str, str], variable: str, argument: str) -> str:
    text = environ.get(variable, "")
    if not text:
        raise ConfigError(f"{variable} is not set; set it, or pass {argument}= to dblp.init_process_group")
    return text


def _whole(argument: str, given: object, environ: Mapping[str, str], variable: str) -> int:
    """The argument, or the variable where it is None, as a whole number."""
    if given is not None:
        if not is_whole(given):
            raise ConfigError(f"{argument}={given!r}: a whole number is needed, not {type(given).__name__}")
        return int(given)
    text = _text(environ, variable, argument)
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}: a number is needed")
    return int(text)
