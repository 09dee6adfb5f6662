"""Tensors on an accelerator: copied through pinned host memory on a stream of their own, beside what the caller computes.

Theory of operation. A collective on a device tensor is three things in a row: a copy to host memory, the round, a copy back. None
of them may stop the caller, and none may begin too early:

- out: the copy runs on a stream for copies out, behind an event of the caller's current stream, so it takes what the caller has
  queued so far, and the caller goes on. The round begins when the copy has ended (``turns``), in the order of the calls.
- back: the copy is queued on a stream for copies back when the round has ended. Who waits for the work makes the stream that is
  current *there* wait for it, as torch's own groups do, and futures are completed with the stream of the copy current, so that
  their callbacks' streams wait as well. The host never waits for a copy back.
- segments: a large exact all-reduce is cut; while one segment is in its round, the next is copied out and the one before back.

Pinned memory is torch's: its caching host allocator keeps what was freed, and knows which copies still use it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

SEGMENT_BYTES = 4 << 20
"""Bytes of a segment: a third of a millisecond of a PCIe copy, and far more than a round's fixed cost is worth."""
Event = Any
"""What an accelerator calls an event: the end of what was queued before it."""


class Accelerator(ABC):
    """What staging needs of a device. All but ``finish`` return at once."""

    @abstractmethod
    def host(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous host tensor of the shape and dtype of ``like``, in memory that the device copies to and from directly."""

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a contiguous copy of it on the device, made on the caller's current stream."""
        return tensor.detach().contiguous()

    @abstractmethod
    def mark(self) -> Event:
        """An event behind all that is queued on the caller's current stream."""

    @abstractmethod
    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Queue a copy to host memory on the stream for copies out, behind ``after``; the event of its end. The memory of
        ``source`` is not given to others before."""

    @abstractmethod
    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Queue a copy, from host memory or from the device's own, on the stream for copies back; the event of its end. As
        ``copy_out``. A sparse target gets new memory, which whoever uses it must ``keep``."""

    @abstractmethod
    def finish(self, event: Event) -> None:
        """Wait, on this thread, until an event has happened; other Python threads run meanwhile."""

    @abstractmethod
    def join(self, event: Event) -> None:
        """Have what is queued on the caller's current stream from now on wait for an event."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> None:
        """The caller's current stream uses a sparse tensor's memory, which was made on the stream for copies back: when it is
        freed, it is not given to others before."""

    @abstractmethod
    def under(self) -> AbstractContextManager[Any]:
        """Within it the stream for copies back is the current one."""


class CudaAccelerator(Accelerator):
    """A CUDA device (ROCm's torch has the same names)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # devices copy both ways at once

    def host(self, like: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def mark(self) -> Event:
        """See the base class."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """See the base class."""
        self._out.wait_event(after)
        source.record_stream(self._out)
        return self._copy(host, source, self._out)

    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """See the base class."""
        for tensor in (target, source):
            if tensor.is_cuda and tensor.layout == torch.strided:
                tensor.record_stream(self._back)
        return self._copy(target, source, self._back)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> Event:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event

    def finish(self, event: Event) -> None:
        """See the base class."""
        event.synchronize()

    def join(self, event: Event) -> None:
        """See the base class."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """See the base class."""
        stream = torch.cuda.current_stream(self._device)
        for part in (tensor._indices(), tensor._values()):
            part.record_stream(stream)

    def under(self) -> AbstractContextManager[Any]:
        """See the base class."""
        return torch.cuda.stream(self._back)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A copy back that is queued."""

    accelerator: Accelerator
    event: Event
    made: torch.Tensor | None = None
    """The tensor, if it is sparse: the copy gives it new memory."""

    def join(self) -> None:
        """Have the caller's current stream wait for it."""
        self.accelerator.join(self.event)
        if self.made is not None:
            self.accelerator.keep(self.made)


class Departure:
    """A copy out that is queued; ``wait()`` blocks until it has ended."""

    __slots__ = ("_accelerator", "_event")

    def __init__(self, accelerator: Accelerator, event: Event) -> None:
        self._accelerator = accelerator
        self._event = event

    def wait(self) -> None:
        """Block until the host array has the tensor's content."""
        self._accelerator.finish(self._event)


class Accelerators:
    """The process's accelerators by device, made when first asked for."""

    def __init__(self) -> None:
        self._found: dict[torch.device, Accelerator] = {}
        self._lock = threading.Lock()

    def of(self, tensor: torch.Tensor) -> Accelerator | None:
        """The one that a tensor is on; None for host memory, and for devices that are copied from and to at once."""
        return self._of_device(tensor.device) if tensor.is_cuda else None

    def _of_device(self, device: torch.device) -> Accelerator:
        with self._lock:
            if device not in self._found:
                self._found[device] = CudaAccelerator(device)
            return self._found[device]


accelerators = Accelerators()
"""What ``tensors.stage`` asks; the tests put a stand-in here."""


class _Departures(threading.local):
    def __init__(self) -> None:
        self.queued: list[Departure] = []


_departures = _Departures()


def depart(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """Queue the copy of a tensor, as the caller's current stream leaves it, to a new host tensor. The collective that this thread
    starts next waits for it (``take_departures``)."""
    host = accelerator.host(tensor)
    _departures.queued.append(Departure(accelerator, accelerator.copy_out(host, tensor, accelerator.mark())))
    return host


def take_departures() -> Sequence[Departure]:
    """The copies that this thread has queued since it asked last."""
    if not _departures.queued:
        return ()
    queued, _departures.queued = _departures.queued, []
    return queued


def finish_departures() -> None:
    """Wait for the copies that this thread has queued: for callers that use the arrays at once."""
    for departure in take_departures():
        departure.wait()


@contextlib.contextmanager
def current(arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Within it the stream of each device that something arrives on is the current one there."""
    with contextlib.ExitStack() as stack:
        for arrival in last_of_each(arrivals):
            stack.enter_context(arrival.accelerator.under())
        yield


def last_of_each(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Of copies that one thread has queued, in their order, the last on each device: a stream makes its copies in that order."""
    return list({id(arrival.accelerator): arrival for arrival in arrivals}.values())


def cutter_of(tensor: torch.Tensor) -> Accelerator | None:
    """The accelerator of a tensor that is large enough for segments; it is so on every rank, since its size is the same."""
    return accelerators.of(tensor) if tensor.nbytes >= 2 * SEGMENT_BYTES else None


Restore = Callable[[], Sequence[Arrival]]
"""``restore()``: queue or make the copies back; what of them is only queued."""
