"""How a torch process group meets: through the store that torch hands to the backend."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dblp.collectives.engine import Engine
from dblp.collectives.rendezvous import Member, Roster, rendezvous_by_store
from dblp.collectives.session import Meet
from dblp.errors import DblpError, HandshakeError
from dblp.transport.port import Address

_log = logging.getLogger("dblp.torch")


def master_of(store: Any) -> Address | None:
    """Where the store's server is, or MASTER_ADDR; None if neither says (a FileStore on one host)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, c10d.TCPStore):
        return Address(store.host, store.port)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return Address(host, int(port) if port.isdecimal() else 0) if host else None


def meet_by_store(store: Any, rank: int, world_size: int, timeout_s: float) -> Meet:
    """The ranks exchange their addresses through ``store``. Meeting raises what ``rendezvous_by_store`` raises, and
    HandshakeError if the store does not answer."""
    master = master_of(store)
    place = f"{master.host}:{master.port}" if master is not None else "the group's store"

    def meet(engine: Engine, member: Callable[[int], Member]) -> Roster:
        try:
            return rendezvous_by_store(
                store, member, rank=rank, world_size=world_size, timeout_s=timeout_s, place=place
            )
        except DblpError:  # some are OSErrors, as timeouts are
            raise
        except (RuntimeError, OSError) as error:  # of torch's stores
            raise HandshakeError(
                f"rank {rank} of {world_size}: the store at {place} does not answer ({error}); is the process that serves it "
                "(torchrun's agent, or rank 0) alive, and its port open to this host?"
            ) from error

    return meet


def inner_backend(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A gloo group for the C++ calls that no Python method can receive; None where gloo is missing.

    Connections are made on first use, of which a warning tells, so that a group that never falls through costs two idle threads;
    torch 2.7, which cannot do so, makes them at once and unsaid. A store outlives destroy and init within one process: what an
    earlier group left there is not read.
    """
    if not dist.is_gloo_available():
        return None
    try:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device()]
        options._timeout = timeout
        options._threads = 1
        generation = store.add(f"gloo/{world_size}/generation/{rank}", 1)
        watched = _WatchedStore(store)
        inner = c10d.ProcessGroupGloo(
            c10d.PrefixStore(f"gloo/{world_size}/{generation}", watched), rank, world_size, options
        )
        watched.watch()
        _inner[inner] = watched
        return inner
    except (
        RuntimeError,
        TypeError,
        AttributeError,
    ) as error:  # no host name, or another torch's options
        _log.debug("no gloo group behind the dblp group: %s", error)
        return None


class _WatchedStore(c10d.Store):
    """The store of a gloo group, which tells when the group first looks for another rank's address: it is about to connect.
    Called on gloo's threads. Only what gloo calls is here."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._watching = False

    def watch(self) -> None:
        """From now on it tells; a group that connects when it is made has not been used then."""
        self._watching = True

    def set(self, key: str, value: Any) -> None:
        """Publish an own address."""
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        """Read another's."""
        self._tell()
        return self._store.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Wait for another's."""
        self._tell()
        self._store.wait(keys, *timeout)

    def _tell(self) -> None:
        global _told
        if self._watching and not _told:
            _told = True
            _log.warning(FELL_THROUGH)


FELL_THROUGH = (
    "a collective of a dblp group runs over gloo, so its bytes go over TCP and not over dblp: torch calls it in C++ only, "
    "where no Python method is reached. The one that is known is torch.ops._c10d_functional.all_gather_into_tensor_out, which "
    "inductor's passes make of all-gathers that they bucket: call all_gather_into_tensor instead, or compile without them "
    "(bucket_all_gathers_fx and aten_distributed_optimizations.collective_bucketing of torch._inductor.config). The result is "
    "right. This is said once a process."
)
"""The warning."""
_told = False


def _gloo_device() -> Any:
    try:
        return c10d.ProcessGroupGloo.create_default_device(lazy_init=True)
    except TypeError:
        return c10d.ProcessGroupGloo.create_default_device()


_inner: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The gloo groups of this process, and their stores, whose Python half has to live as long."""


def _keep_in_fork() -> None:
    """A fork has none of gloo's threads, and the destructor, which joins them, would end the process: there it never runs."""
    for inner in list(_inner):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


os.register_at_fork(after_in_child=_keep_in_fork)


def device_types() -> list[torch.device]:
    """The devices whose tensors the backend takes on this host."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]
