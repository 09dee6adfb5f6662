"""The torch.distributed backend ``dblp``: a ProcessGroup whose collectives run on dblp's engine, always
exact.

How torch meets it: ``_new_process_group_helper`` takes an instance of a ProcessGroup subclass as *the* group,
for all device types; Python callers then call these methods directly, C++ callers (the DDP reducer,
functional collectives) through trampolines that exist for some methods only. Where torch has none
(``all_gather_into_tensor_out``), the call falls through to the backend that is registered on the object: a
gloo group that connects on first use.

torch renamed methods after 2.12; both names are kept. Gradients may lose something only through
``allreduce_lossy``, which ``hook.attach`` calls.
"""

# mypy: disable-error-code="override"
# The stubs declare overloads, which ``overloads.overloaded`` brings into one form.

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dblp.collectives.carry import Residual
from dblp.collectives.group import Group
from dblp.collectives.numbering import begin_as
from dblp.collectives.priority import Priority
from dblp.collectives.recorder import FlightRecorder
from dblp.collectives.session import Session
from dblp.collectives.torch.meeting import device_types, inner_backend, master_of, meet_by_store
from dblp.collectives.torch.monitor import monitored_barrier
from dblp.collectives.torch.operations import op_name, premultiply, stage_operand
from dblp.collectives.torch.overloads import overloaded
from dblp.collectives.torch.segments import SegmentedReduction
from dblp.collectives.torch.sparse import SparseReduction
from dblp.collectives.torch.staging import Accelerator, cutter_of, take_departures
from dblp.collectives.torch.tensors import Staged, cut, is_floating, restore_all, stage, stage_all
from dblp.collectives.torch.tracing import traced
from dblp.collectives.torch.turns import Turns
from dblp.collectives.torch.work import DblpWork, JoinedWork, completer, keep_if_small
from dblp.errors import UnsupportedError
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Policy

NAME = "dblp"
"""The backend's name in ``init_process_group``."""
_log = logging.getLogger("dblp.torch")
_warned_of_order = False
Tensors = Sequence[torch.Tensor]
Call = Callable[[Group, float], Awaitable[Any]]
"""``call(group, timeout_s)``: one collective on arrays."""


class DblpProcessGroup(dist.ProcessGroup):
    """One rank's membership in a torch process group. Ranks are ranks in this group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        name: str,
        config: TransportConfig,
    ) -> None:
        """Meet the other ranks through ``store``; raises what ``Session`` raises."""
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # not in the stub
        self._rank_here = rank
        self._world_size_here = world_size
        self._timeout = timeout
        self._name = name
        self._desc = "undefined"
        self._store = store
        self._sequence = 0
        self._barriers = 0
        self._coalescing = threading.local()
        self._turns = Turns()
        self.session = Session(
            config,
            meet_by_store(store, rank, world_size, config.connect_timeout_s),
            rank=rank,
            world_size=world_size,
            master=master_of(store),
        )
        self._register_inner()

    # Identity. The base class asks registered backends, which is not where this group lives.

    def name(self) -> str:
        """The backend's name."""
        return NAME

    getBackendName = name

    def rank(self) -> int:
        """Rank in this group."""
        return self._rank_here

    getRank = rank

    def size(self) -> int:
        """Ranks in this group."""
        return self._world_size_here

    getSize = size

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """The user's description of the group."""
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)  # type: ignore[arg-type]

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def get_group_store(self) -> Any:
        """The store that this group met through."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Default timeout of the collectives that follow."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # Life.

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The last rounds of this group, as text or JSON."""
        return self.session.group.flight_recorder

    def shutdown(self) -> None:
        """Leave the group; lingers until what was sent is acknowledged. Called by
        ``destroy_process_group``."""
        self.session.close()

    def abort(self) -> None:
        """Leave the group at once; work in flight fails."""
        self.session.close(linger_s=0.0)

    # Collectives on one tensor.

    @overloaded(c10d.AllreduceOptions, 1, "op", "timeout")
    @traced("all_reduce", inputs=0)
    def allreduce(self, tensors: Tensors, opts: Any = None) -> DblpWork:
        """Reduce each tensor over all ranks, in place; exact."""
        return self._allreduce("all_reduce", tensors, opts)

    @traced("all_reduce_coalesced", inputs=0)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> DblpWork:
        """Reduce each tensor over all ranks by itself, in place; exact."""
        return self._allreduce("all_reduce_coalesced", tensors, opts)

    @traced("all_reduce_lossy", inputs=0)
    def allreduce_lossy(
        self,
        tensor: torch.Tensor,
        policy: Policy,
        op: str = "avg",
        *,
        carry: Residual | None = None,
        priority: Priority | None = None,
    ) -> DblpWork:
        """Reduce a gradient under ``policy``, in place; the work's ``report`` says what is missing. ``carry``: what this rank
        keeps of it for the next round of the same bucket; given on all ranks or on none. ``priority``: what is known of the
        bucket's chunks.

        Raises UnsupportedError for a lossy policy on a tensor that is not floating-point.
        """
        _check_lossy(policy, tensor)
        item = stage(tensor, arithmetic=True)

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.all_reduce(
                item.array,
                op,
                policy=policy,
                carry=carry,
                priority=priority,
                timeout_s=timeout_s,
                dtype=item.dtype,
            )

        return self._start("all_reduce of a gradient", call, [item], None)

    def allreduce_compressed(
        self, tensor: torch.Tensor, reduce: Callable[[npt.NDArray[Any], str | None, float], Awaitable[Any]]
    ) -> DblpWork:
        """Average a gradient, in place, by ``reduce(array, dtype, timeout_s)``, which is called on the engine with the tensor's
        host array; its result is the work's ``report``."""
        item = stage(tensor, arithmetic=True)

        def call(_: Group, timeout_s: float) -> Awaitable[Any]:
            return reduce(item.array, item.dtype, timeout_s)

        return self._start("compressed all_reduce of a gradient", call, [item], None)

    @traced("reduce_scatter_lossy", inputs=1)
    def reduce_scatter_lossy(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        policy: Policy,
        op: str = "avg",
        *,
        carry: Residual | None = None,
        priorities: Sequence[Priority] | None = None,
    ) -> DblpWork:
        """Rank r gets the r-th part of a gradient, reduced under ``policy``. ``carry``: of the whole ``input``; ``priorities``:
        what is known of each part's chunks. Otherwise as ``allreduce_lossy``."""
        _check_lossy(policy, input)
        target, source = stage(output, arithmetic=True), stage(input, arithmetic=True)

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.reduce_scatter(
                target.array,
                source.array,
                op,
                policy=policy,
                carry=carry,
                priorities=priorities,
                timeout_s=timeout_s,
                dtype=target.dtype,
            )

        return self._start("reduce_scatter of a gradient", call, [target], None)

    def agree(self, vector: npt.NDArray[np.float64], op: str = "max") -> None:
        """Reduce a short vector by ``op`` over all ranks, in place, exactly; blocks until that is done."""

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.all_reduce(vector, op, timeout_s=timeout_s)

        self._start("agreement of the ranks", call, [], None).wait()

    @overloaded(c10d.BroadcastOptions, 1, "root", "timeout")
    @traced("broadcast", inputs=0)
    def broadcast(self, tensors: Tensors, opts: Any) -> DblpWork:
        """Copy the root's tensors to all ranks."""
        works = []
        for item in stage_all(tensors):
            works.append(self._broadcast(item, opts))
        return self._one("broadcast", works, opts)

    @overloaded(c10d.ReduceOptions, 1, "root", "op", "timeout")
    @traced("reduce", inputs=0)
    def reduce(self, tensors: Tensors, opts: Any) -> DblpWork:
        """Reduce to the root; the other ranks' tensors are left in an undefined state."""
        (tensor,) = tensors
        item = stage_operand(tensor, opts.reduceOp)
        op = op_name(opts.reduceOp)

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.reduce(item.array, opts.rootRank, op, timeout_s=timeout_s, dtype=item.dtype)

        return self._start("reduce", call, [item], opts)

    @overloaded(c10d.BarrierOptions, 0, "timeout")
    @traced("barrier")
    def barrier(self, opts: Any = None) -> DblpWork:
        """Ends when every rank has called it."""

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.barrier(timeout_s=timeout_s)

        return self._start("barrier", call, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier through the store that names the ranks that have not come; the group stays usable."""
        self._barriers += 1
        limit = timeout if timeout is not None and timeout >= timedelta(0) else self._timeout
        monitored_barrier(
            self._store, self._barriers, self._rank_here, self._world_size_here, limit, wait_all_ranks
        )

    # Gathering.

    @overloaded(c10d.AllgatherOptions, 2, "timeout")
    @traced("all_gather", inputs=1)
    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> DblpWork:
        """Every rank gets the tensors of all, which may differ in size."""
        works = [
            self._all_gather("all_gather", stage_all(outputs), stage(tensor), opts)
            for outputs, tensor in zip(output_lists, inputs, strict=True)
        ]
        return self._one("all_gather", works, opts)

    @traced("all_gather_coalesced", inputs=1)
    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> DblpWork:
        """Several tensors at once: ``output_lists[rank][i]`` is the rank's i-th input."""
        works = [
            self._all_gather("all_gather_coalesced", stage_all(outputs), stage(tensor), opts)
            for *outputs, tensor in zip(*output_lists, inputs, strict=True)
        ]
        return self._one("all_gather_coalesced", works, opts)

    @traced("all_gather_into_tensor", inputs=1)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DblpWork:
        """Every rank gets all tensors, one behind the other."""
        return self._all_gather("all_gather_single", stage(output), stage(input), opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DblpWork:
        """``all_gather_single`` for each pair."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._one("all_gather_single_coalesced", works, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    @overloaded(c10d.GatherOptions, 2, "root", "timeout")
    @traced("gather", inputs=1)
    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> DblpWork:
        """The root gets the tensors of all."""
        (tensor,) = inputs
        source = stage(tensor)
        targets = stage_all(output_lists[0]) if self._rank_here == opts.rootRank else []

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            arrays = [item.array for item in targets] or None
            return group.gather(arrays, source.array, opts.rootRank, timeout_s=timeout_s)

        return self._start("gather", call, targets, opts)

    # Scattering.

    @overloaded(c10d.ScatterOptions, 2, "root", "timeout")
    @traced("scatter", inputs=1)
    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> DblpWork:
        """Each rank gets its tensor from the root."""
        (tensor,) = outputs
        target = stage(tensor)
        sources = stage_all(input_lists[0]) if self._rank_here == opts.rootRank else []

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            arrays = [item.array for item in sources] or None
            return group.scatter(target.array, arrays, opts.rootRank, timeout_s=timeout_s)

        return self._start("scatter", call, [target], opts)

    @overloaded(c10d.ReduceScatterOptions, 2, "op", "timeout")
    @traced("reduce_scatter", inputs=1)
    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> DblpWork:
        """Rank r gets the reduced r-th inputs."""
        works = [
            self._reduce_scatter("reduce_scatter", output, inputs, opts)
            for output, inputs in zip(outputs, input_lists, strict=True)
        ]
        return self._one("reduce_scatter", works, opts)

    @traced("reduce_scatter_tensor", inputs=1)
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DblpWork:
        """Rank r gets the r-th part of the reduced input."""
        return self._reduce_scatter("reduce_scatter_single", output, input, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> DblpWork:
        """``reduce_scatter_single`` for each pair."""
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._one("reduce_scatter_single_coalesced", works, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # All to all.

    @overloaded(c10d.AllToAllOptions, 2, "timeout")
    @traced("all_to_all", inputs=1)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DblpWork:
        """Rank r's i-th output is rank i's r-th input."""
        targets, sources = stage_all(outputs), stage_all(inputs)
        parts = [item.array for item in targets], [item.array for item in sources]
        return self._all_to_all("all_to_all", parts, targets, opts)

    @traced("all_to_all_single", inputs=1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> DblpWork:
        """The same with one tensor, cut along its first dimension: evenly where no sizes are given."""
        target, source = stage(output), stage(input)
        parts = (
            cut(target.array, self._world_size_here, output_split_sizes, "output"),
            cut(source.array, self._world_size_here, input_split_sizes, "input"),
        )
        return self._all_to_all("all_to_all_single", parts, [target], opts)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # Point to point: posted when called, matched by source and tag, never queued behind a collective.

    @traced("send", inputs=0)
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> DblpWork:
        """Send one tensor."""
        (tensor,) = tensors
        item = stage(tensor)

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.send(item.array, dst, tag, timeout_s=timeout_s)

        return self._start(f"send to rank {dst}", call, [], None, outputs=[tensor])

    @traced("recv", inputs=0)
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> DblpWork:
        """Receive one tensor from ``src``."""
        return self._recv(tensors, src, tag)

    @traced("recvAnySource", inputs=0)
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> DblpWork:
        """Receive one tensor from whoever sends one; the work's ``source_rank()`` tells who did."""
        return self._recv(tensors, None, tag)

    # Coalescing: works start at once all the same; the end hands back one work for all.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing.works = []

    def _end_coalescing(self, device: torch.device | None = None) -> DblpWork:
        works, self._coalescing.works = getattr(self._coalescing, "works", None) or [], None
        timeout_s = max((work.timeout_s for work in works), default=self._seconds(None))
        return JoinedWork("coalesced collectives", timeout_s, works)

    # Inside.

    def _register_inner(self) -> None:
        inner = inner_backend(self._store, self._rank_here, self._world_size_here, self._timeout)
        if inner is None:
            return
        self._inner = inner  # so that a fork can keep it from its destructor
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in device_types():
            self._register_backend(device, kind, inner)
        self._set_default_backend(kind)

    def _seconds(self, opts: Any) -> float:
        """Timeout of a call: its own, or the group's (an unset one is negative)."""
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        return seconds if seconds > 0 else self._timeout.total_seconds()

    def _start(
        self,
        what: str,
        call: Call,
        results: Sequence[Staged],
        opts: Any,
        outputs: Tensors | None = None,
    ) -> DblpWork:
        """Start ``call`` on the engine; ``results`` are copied back where they were staged. What this thread has staged since its
        last call has to arrive before it begins."""
        timeout_s, departures, turns = self._seconds(opts), take_departures(), self._turns
        restore = (lambda: restore_all(results)) if any(item.copied for item in results) else None
        if outputs is None:
            outputs = [item.tensor for item in results]

        def start(group: Group) -> Awaitable[Any]:
            return turns.start(departures, lambda: call(group, timeout_s))

        return self._submit(what, timeout_s, start, DblpWork(what, timeout_s, outputs, restore))

    def _submit(
        self, what: str, timeout_s: float, start: Callable[[Group], Awaitable[Any]], work: DblpWork
    ) -> DblpWork:
        self._sequence += 1
        if not work.origin.placed and completer.runs_here():
            _warn_of_order(what)
        self.session.submit(
            what, timeout_s, lambda group: begin_as(work.origin, lambda: start(group)), work.finish
        )
        return self._coalesced(work)

    def _coalesced(self, work: DblpWork) -> DblpWork:
        """Between ``_start_coalescing`` and ``_end_coalescing``, in their thread, ``work`` is one of those that end as one."""
        coalescing = getattr(self._coalescing, "works", None)
        if coalescing is not None:
            coalescing.append(work)
        return work

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Works that are started here are parts of another: whoever coalesces gets that one, not them."""
        works, self._coalescing.works = getattr(self._coalescing, "works", None), None
        try:
            yield
        finally:
            self._coalescing.works = works

    def _one(self, what: str, works: Sequence[DblpWork], opts: Any) -> DblpWork:
        return works[0] if len(works) == 1 else JoinedWork(what, self._seconds(opts), works)

    def _allreduce(self, what: str, tensors: Tensors, opts: Any) -> DblpWork:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        name = op_name(op)
        works = []
        for tensor in tensors:
            if tensor.layout != torch.strided:
                works.append(self._allreduce_sparse(tensor, name, opts))
                continue
            if (accelerator := cutter_of(tensor)) is not None:
                works.append(self._allreduce_segments(what, accelerator, tensor, op, opts))
                continue
            item = stage_operand(tensor, op)
            works.append(self._start(what, _all_reduce_call(item, name), [item], opts))
            keep_if_small(works[-1], tensor)
        return self._one(what, works, opts)

    def _allreduce_segments(
        self, what: str, accelerator: Accelerator, tensor: torch.Tensor, op: Any, opts: Any
    ) -> DblpWork:
        reduction = SegmentedReduction(accelerator, tensor, op)
        timeout_s, turns = self._seconds(opts), self._turns

        def start(group: Group) -> Awaitable[Any]:
            return turns.take(lambda: reduction.begin(group, timeout_s))

        return self._submit(what, timeout_s, start, DblpWork(what, timeout_s, [tensor], reduction.restored))

    def _allreduce_sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> DblpWork:
        reduction = SparseReduction(tensor, op, self._world_size_here)
        what = "all_reduce of a sparse tensor"
        with self._apart():  # the sum is made when the rounds have ended
            self._start(what, reduction.gather_facts, [], opts).wait()
            reduction.make_room()
            rounds = [reduction.gather_indices, reduction.gather_values]
            works = [self._start(what, call, [], opts) for call in rounds]
        return self._coalesced(JoinedWork(what, self._seconds(opts), works, [tensor], reduction.add))

    def _broadcast(self, item: Staged, opts: Any) -> DblpWork:
        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.broadcast(item.array, opts.rootRank, timeout_s=timeout_s)

        return self._start("broadcast", call, [item], opts)

    def _all_gather(self, what: str, targets: Staged | list[Staged], source: Staged, opts: Any) -> DblpWork:
        arrays = [item.array for item in targets] if isinstance(targets, list) else targets.array

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.all_gather(arrays, source.array, timeout_s=timeout_s)

        return self._start(what, call, targets if isinstance(targets, list) else [targets], opts)

    def _reduce_scatter(
        self, what: str, output: torch.Tensor, inputs: torch.Tensor | Tensors, opts: Any
    ) -> DblpWork:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        name, target = op_name(op), stage(output, arithmetic=True)
        if isinstance(inputs, torch.Tensor):
            arrays: Any = stage(premultiply(inputs, op), arithmetic=True).array
        else:
            arrays = [stage(premultiply(tensor, op), arithmetic=True).array for tensor in inputs]

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.reduce_scatter(target.array, arrays, name, timeout_s=timeout_s, dtype=target.dtype)

        return self._start(what, call, [target], opts)

    def _all_to_all(self, what: str, parts: tuple[Any, Any], targets: list[Staged], opts: Any) -> DblpWork:
        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.all_to_all(parts[0], parts[1], timeout_s=timeout_s)

        return self._start(what, call, targets, opts)

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> DblpWork:
        (tensor,) = tensors
        item = stage(tensor)

        def call(group: Group, timeout_s: float) -> Awaitable[Any]:
            return group.recv(item.array, src, tag, timeout_s=timeout_s)

        return self._start(f"recv from {'any rank' if src is None else f'rank {src}'}", call, [item], None)


def _all_reduce_call(item: Staged, op: str) -> Call:
    def call(group: Group, timeout_s: float) -> Awaitable[Any]:
        return group.all_reduce(item.array, op, timeout_s=timeout_s, dtype=item.dtype)

    return call


def _warn_of_order(what: str) -> None:
    global _warned_of_order
    if not _warned_of_order:
        _warned_of_order = True
        _log.warning(
            "%s in a callback whose place is not known, as that of torch.futures.collect_all: all ranks must run such callbacks "
            "in one order with their other calls, or sums get mixed up; wait for the futures, and call it then", what,
        )  # fmt: skip


def _check_lossy(policy: Policy, tensor: torch.Tensor) -> None:
    if policy.lossy and not is_floating(tensor):
        raise UnsupportedError(
            f"a loss policy on a {tensor.dtype} tensor: only floating-point gradients may lose anything; "
            "use dblp.Exact()"
        )
