"""Groups: the collectives on numpy arrays, as async calls over an Endpoint.

Every method posts its messages at once and returns a task; several rounds may be in flight. Rounds are numbered in the order of
the calls, so all ranks must call the same collectives in the same order, as everywhere; for calls in callbacks see ``numbering``.
Transfers (send and recv) are matched by source and tag instead and may be called in any order between them.

Every wait has a deadline, and any failure within a round poisons the group and its endpoint: the peers learn the reason, and
later calls raise ClosedError. Cancelling a task is such a failure. A call that is refused for its arguments
(ConfigError, UnsupportedError, raised by the call itself) costs nothing.

All methods must be called on the endpoint's loop. Ranks are ranks in the group; errors name the endpoint's ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dblp.collectives.algorithms import algorithm_of, check_reduce_scatter, choose
from dblp.collectives.algorithms.exchange import post_broadcast, post_call, post_exchange
from dblp.collectives.algorithms.gather_leg import post_gather
from dblp.collectives.algorithms.grid import chunk_bytes
from dblp.collectives.algorithms.incast import Incast
from dblp.collectives.algorithms.reduce_leg import post_reduce_leg
from dblp.collectives.blocks import Blocks
from dblp.collectives.buffers import Array, Arrays, Buffer, Parts, overlaps, private
from dblp.collectives.call import Call, Collective, details_of, digest_sizes
from dblp.collectives.carry import Residual
from dblp.collectives.carrying import Carrying
from dblp.collectives.numbering import Numbering, RoundNumber
from dblp.collectives.p2p import GROUP_LIMIT, MAX_RANKS, Mailbox
from dblp.collectives.priority import Priority
from dblp.collectives.recorder import FlightRecorder
from dblp.collectives.reduction import DType, Op, Reducer, check_op, dtype_of, parse_op
from dblp.collectives.report import Report
from dblp.collectives.round import Round
from dblp.collectives.staging import StagePool
from dblp.collectives.uncounted import Uncounted
from dblp.errors import ClosedError, ConfigError, UnsupportedError
from dblp.transport.fields import whole
from dblp.transport.interface import EndpointLike
from dblp.transport.places import place_name
from dblp.transport.policy import Consistency, Exact, Policy
from dblp.units import check_timeout

Post = Callable[[Round], None]
Finish = Callable[[], None]
_EMPTY: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class Group:
    """Some or all ranks of an endpoint, as one rank sees them."""

    def __init__(
        self,
        endpoint: EndpointLike,
        *,
        ranks: Sequence[int] | None = None,
        group_id: int = 0,
        timeout_s: float | None = None,
        name: str = "default",
    ) -> None:
        """``ranks``: the endpoint's ranks that belong to the group, in the order of their ranks in it; None: all. ``name``: what
        the flight recorder calls it.
        ``group_id``: the same on all of them, and another one for every other group that shares a rank, 0..16383.
        ``timeout_s``: for calls that name none; None: the endpoint's. Raises ConfigError."""
        self._endpoint = endpoint
        self._ranks = list(range(endpoint.world_size)) if ranks is None else [int(rank) for rank in ranks]
        self._check_members(group_id)
        self._id = group_id
        self._timeout_s = endpoint.config.timeout_s if timeout_s is None else timeout_s
        self._numbering = Numbering(group_id)
        self._failure: BaseException | None = None
        self._closed = False
        self._pool = StagePool()
        self._incast = Incast(len(self._ranks) - 1)
        self.flight_recorder = FlightRecorder(
            rank=endpoint.rank, ranks=self._ranks, group=group_id, rounds=endpoint.config.flight_rounds, clock=endpoint.time,
            name=name,
        )  # fmt: skip
        self.on_failure: Callable[[BaseException], None] = _ignore_failure
        """Called once, with the first failure of the group, before the endpoint is told of it."""
        self._mailbox = Mailbox(endpoint, self._ranks, group_id, self._poison, self.flight_recorder)

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._ranks.index(self._endpoint.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The endpoint's ranks, by rank in the group."""
        return tuple(self._ranks)

    @property
    def group_id(self) -> int:
        """The id that all ranks gave."""
        return self._id

    def least_delay_s(self) -> float:
        """Least round trip of the network to the rank that is farthest off, by the path that is nearest; 0 if the endpoint does
        not know it yet, or at all."""
        states = [self._endpoint.path_states(rank) for rank in self._ranks if rank != self._endpoint.rank]
        known = [[state.least_rtt_s for state in paths if state.least_rtt_s > 0.0] for paths in states]
        return max(map(min, known), default=0.0) if all(known) else 0.0

    @property
    def max_chunk_bytes(self) -> int:
        """The largest chunk of the group's messages, in bytes."""
        return self._endpoint.max_chunk_bytes

    def close(self) -> None:
        """End the group here; idempotent. The endpoint stays open. Later calls raise ClosedError."""
        if not self._closed:
            self._closed = True
            self._mailbox.close()

    def fail(self, error: Exception) -> None:
        """End the group and its endpoint with ``error``, which the peers are told: for what goes wrong between rounds."""
        self._poison(error)

    # reducing

    def all_reduce(
        self,
        array: Array,
        op: str | Op = "sum",
        *,
        policy: Policy | None = None,
        algorithm: str = "auto",
        carry: Residual | Uncounted | None = None,
        priority: Priority | None = None,
        timeout_s: float | None = None,
        dtype: str | None = None,
        codes: bool = False,
    ) -> asyncio.Task[Report]:
        """Reduce ``array`` over all ranks, in place; every rank ends with the same bits.

        ``policy`` may allow a floating sum or average to lose chunks on the way to their reduction; ``algorithm``
        is ``auto`` or one of ``algorithms.ALL_REDUCE``, with its options (``"ps(servers=0+1,serve_only)"``);
        ``dtype="bfloat16"`` names what uint16 arrays hold. ``carry``: what this rank kept of earlier rounds of the same bucket,
        which is added to ``array``; what this round loses is kept there under ``policy.carry``, or discarded without one. All
        ranks give one, or none does. ``priority``: what ``policy.tags`` knows of the bucket's layers and of its chunks that were
        missing before; each rank for itself. ``codes``: the integers in ``array`` are codes of a floating-point gradient, 0 for
        nothing, so that their sum may lose chunks as well.
        Raises ConfigError and UnsupportedError in the call; the task raises MismatchError, DeadlineError, PeerError.
        """
        buffer = Buffer(array, "array", output=True)
        kind, operation, policy = self._reduction(array, op, policy, dtype, codes)
        flat = buffer.flat
        name, reason = choose(algorithm, flat.nbytes, self.world_size, kind, policy)
        call = Call(
            collective=Collective.ALL_REDUCE,
            dtype=kind,
            op=operation,
            count=flat.size,
            algorithm=name,
            reason=reason,
            policy=policy,
            residual=carry is not None,
        )
        reducer = Reducer(kind, operation, self.world_size)
        carrying = None if carry is None else Carrying(carry, flat, call, self.rank, self.world_size)

        def post(round_: Round) -> None:
            if carrying is not None:
                round_.carries = carrying.keeps
                carrying.begin()
            if self.world_size == 1:
                reducer.finish(flat)
            else:
                keep = None if carry is None else carry.keep
                algorithm_of(name)(round_, flat, reducer, policy, keep=keep)

        return self._start(call, flat.nbytes, timeout_s, post, buffer.restore, carrying, priority)

    def reduce_scatter(
        self,
        output: Array,
        input: Arrays,
        op: str | Op = "sum",
        *,
        policy: Policy | None = None,
        carry: Residual | None = None,
        priorities: Sequence[Priority] | None = None,
        timeout_s: float | None = None,
        dtype: str | None = None,
    ) -> asyncio.Task[Report]:
        """Reduce each rank's part of ``input`` over all ranks into that rank's ``output``; ``input`` is left alone.

        ``input``: one array of world_size parts, or a list of arrays, whose sizes may differ by rank. ``carry``: as in
        ``all_reduce``, of all parts one behind the other; ``priorities``: as ``priority`` there, one for each part. All of a
        policy's budget is that of the one leg. UnsupportedError is also raised where a lossy policy asks for what only an
        all-reduce can do (see ``check_reduce_scatter``).
        """
        result = Buffer(output, "output", output=True)
        parts = Parts(input, self.world_size, "input", output=False)
        kind, operation, policy = self._reduction(output, op, policy, dtype)
        if policy.lossy:
            check_reduce_scatter(policy)
        parts.check_dtype(output.dtype, "input")
        self._check_size("output", result.flat, parts.sizes[self.rank])
        call = Call(
            collective=Collective.REDUCE_SCATTER,
            dtype=kind,
            op=operation,
            count=sum(parts.sizes),
            policy=policy,
            residual=carry is not None,
            sizes=_sizes(parts),
        )
        reducer = Reducer(kind, operation, self.world_size)
        flats, carrying, keep = parts.flats, None, None
        if carry is not None:
            whole = np.concatenate(parts.flats)  # with what is carried added, ``input`` must not change
            carrying = Carrying(carry, whole, call, self.rank, self.world_size)
            starts = np.cumsum([0, *parts.sizes])
            flats = np.split(whole, starts[1:-1])
            keep = _kept_at(carry, starts.tolist())
        contributions = {rank: part for rank, part in enumerate(flats) if rank != self.rank}
        own = (
            np.empty_like(result.flat) if overlaps(result.flat, list(contributions.values())) else result.flat
        )

        def post(round_: Round) -> None:
            if carrying is not None:
                round_.carries = carrying.keeps
                carrying.begin()
            np.copyto(own, flats[self.rank])
            if self.world_size == 1:
                reducer.finish(own)
            else:
                largest = max(part.nbytes for part in flats)
                chunk = chunk_bytes(largest, round_.endpoint.max_chunk_bytes, policy)
                known = dict(enumerate(priorities)) if priorities is not None else None
                post_reduce_leg(round_, own, contributions, reducer, policy, chunk, _ignore, keep, known)

        def finish() -> None:
            if own is not result.flat:
                np.copyto(result.flat, own)
            result.restore()

        return self._start(call, parts.nbytes, timeout_s, post, finish, carrying)

    def reduce(
        self,
        array: Array,
        root: int,
        op: str | Op = "sum",
        *,
        timeout_s: float | None = None,
        dtype: str | None = None,
    ) -> asyncio.Task[Report]:
        """Reduce ``array`` over all ranks into that of ``root``; the others keep theirs."""
        root = self._check_root(root)
        buffer = Buffer(array, "array", output=self.rank == root)
        kind, operation, policy = self._reduction(array, op, None, dtype)
        flat = buffer.flat
        call = Call(collective=Collective.REDUCE, dtype=kind, op=operation, count=flat.size, root=root)
        reducer = Reducer(kind, operation, self.world_size)

        def post(round_: Round) -> None:
            if self.world_size == 1:
                reducer.finish(flat)
                return
            post_call(round_, root)
            chunk = chunk_bytes(flat.nbytes, round_.endpoint.max_chunk_bytes, policy)
            own, parts = (flat, {}) if self.rank == root else (flat[:0], {root: flat})
            post_reduce_leg(round_, own, parts, reducer, policy, chunk, _ignore)

        return self._start(
            call, flat.nbytes, timeout_s, post, buffer.restore if self.rank == root else _nothing
        )

    # moving

    def all_gather(
        self,
        output: Arrays,
        input: Array,
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Task[Report]:
        """Collect every rank's ``input`` in every rank's ``output``: one array of world_size parts, or a list of arrays,
        whose sizes may differ by rank."""
        parts = Parts(output, self.world_size, "output", output=True)
        source = Buffer(input, "input", output=False)
        parts.check_dtype(input.dtype, "output")
        self._check_size("input", source.flat, parts.sizes[self.rank])
        call = self._moving(Collective.ALL_GATHER, input, count=sum(parts.sizes), sizes=_sizes(parts))
        incoming = {rank: part for rank, part in enumerate(parts.flats) if rank != self.rank}
        flat = private(source.flat, list(incoming.values()))

        def post(round_: Round) -> None:
            np.copyto(parts.flats[self.rank], flat)
            post_exchange(round_, dict.fromkeys(round_.peers(), flat), incoming)

        return self._start(call, parts.nbytes, timeout_s, post, parts.restore)

    def gather_blocks(
        self,
        outputs: Sequence[Array],
        input: Array,
        layouts: Sequence[Blocks],
        policy: Policy,
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Task[Report]:
        """Collect every rank's payload of blocks (``blocks.py``) in every rank's ``outputs``, which may miss blocks under
        ``policy``, within its budget for each rank's payload and over all ranks together.

        ``outputs``: a uint8 array a rank, of which missing blocks are left alone; ``layouts``: of the payloads, by rank, the same
        on all ranks. The report's ``uncounted`` tells which chunks no rank may count. Raises ConfigError for arrays that are not
        as the layouts say, and for ``Consistency.RELAXED``, under which ranks would count different blocks.
        """
        if policy.lossy and policy.consistency is Consistency.RELAXED:
            raise ConfigError(
                "consistency='relaxed' with blocks: all ranks must count the same; use 'agreed'"
            )
        parts = Parts(list(outputs), self.world_size, "outputs", output=True)
        source = Buffer(input, "input", output=False)
        parts.check_dtype(np.dtype(np.uint8), "outputs")
        parts.check_dtype(input.dtype, "input")
        for rank, layout in enumerate(layouts):
            self._check_size(f"the layout of rank {rank}", parts.flats[rank], layout.nbytes)
        self._check_size("input", source.flat, parts.sizes[self.rank])
        call = Call(
            collective=Collective.ALL_GATHER,
            dtype=dtype_of(input),
            policy=policy,
            sizes=digest_sizes(
                size for lay in layouts for size in (lay.count, lay.chunk_bytes, lay.head_bytes)
            ),
        )
        incoming = {rank: part for rank, part in enumerate(parts.flats) if rank != self.rank}
        flat = private(source.flat, list(incoming.values()))

        def post(round_: Round) -> None:
            np.copyto(parts.flats[self.rank], flat)
            if self.world_size > 1:
                post_gather(round_, flat, incoming, layouts, policy)

        return self._start(call, parts.nbytes, timeout_s, post, parts.restore)

    def broadcast(self, array: Array, root: int, *, timeout_s: float | None = None) -> asyncio.Task[Report]:
        """Give every rank the ``array`` of ``root``."""
        root = self._check_root(root)
        buffer = Buffer(array, "array", output=self.rank != root)
        call = self._moving(Collective.BROADCAST, array, count=array.size, root=root)
        finish = _nothing if self.rank == root else buffer.restore
        return self._start(
            call, array.nbytes, timeout_s, lambda round_: post_broadcast(round_, buffer.flat, root), finish
        )

    def gather(
        self,
        output: Arrays | None,
        input: Array,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Task[Report]:
        """Collect every rank's ``input`` in the ``output`` of ``root`` (None elsewhere): one array of world_size parts,
        or a list of arrays, whose sizes may differ by rank."""
        root = self._check_root(root)
        source = Buffer(input, "input", output=False)
        call = self._moving(Collective.GATHER, input, root=root)
        if self.rank != root:

            def offer(round_: Round) -> None:
                post_call(round_, root)
                post_exchange(round_, {root: source.flat}, {})

            return self._start(call, input.nbytes, timeout_s, offer, _nothing)
        if output is None:
            raise ConfigError(f"gather on its root, rank {root}: output is None")
        parts = Parts(output, self.world_size, "output", output=True)
        parts.check_dtype(input.dtype, "output")
        self._check_size("input", source.flat, parts.sizes[root])
        incoming = {rank: part for rank, part in enumerate(parts.flats) if rank != root}
        flat = private(source.flat, list(incoming.values()))

        def post(round_: Round) -> None:
            np.copyto(parts.flats[root], flat)
            post_call(round_, root)
            post_exchange(round_, {}, incoming)

        return self._start(call, parts.nbytes, timeout_s, post, parts.restore)

    def scatter(
        self,
        output: Array,
        input: Arrays | None,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Task[Report]:
        """Give every rank its part of the ``input`` of ``root`` (None elsewhere): one array of world_size parts, or a
        list of arrays, whose sizes may differ by rank."""
        root = self._check_root(root)
        result = Buffer(output, "output", output=True)
        call = self._moving(Collective.SCATTER, output, root=root)
        if self.rank != root:
            return self._start(
                call,
                output.nbytes,
                timeout_s,
                lambda round_: post_exchange(round_, {}, {root: result.flat}),
                result.restore,
            )
        if input is None:
            raise ConfigError(f"scatter on its root, rank {root}: input is None")
        parts = Parts(input, self.world_size, "input", output=False)
        parts.check_dtype(output.dtype, "input")
        self._check_size("output", result.flat, parts.sizes[root])
        outgoing = {
            rank: private(part, [result.flat]) for rank, part in enumerate(parts.flats) if rank != root
        }

        def post(round_: Round) -> None:
            np.copyto(result.flat, parts.flats[root])
            post_exchange(round_, outgoing, {})

        return self._start(call, parts.nbytes, timeout_s, post, result.restore)

    def all_to_all(
        self,
        output: Arrays,
        input: Arrays,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> asyncio.Task[Report]:
        """Send part j of ``input`` to rank j, receive rank j's into part j of ``output``. Both: one array, cut evenly or at
        ``..._splits`` (rows of the first dimension for each rank), or a list of one array a rank."""
        results = Parts(output, self.world_size, "output", output=True, splits=output_splits)
        parts = Parts(input, self.world_size, "input", output=False, splits=input_splits)
        results.check_dtype(parts.dtype, "output")
        parts.check_dtype(parts.dtype, "input")
        rank = self.rank
        self._check_size(f"output for rank {rank}", results.flats[rank], parts.sizes[rank])
        call = self._moving(Collective.ALL_TO_ALL, parts.flats[0])
        sources = [private(part, results.flats) for part in parts.flats]
        incoming = {peer: part for peer, part in enumerate(results.flats) if peer != rank}

        def post(round_: Round) -> None:
            np.copyto(results.flats[rank], sources[rank])
            post_exchange(round_, {peer: sources[peer] for peer in round_.peers()}, incoming)

        return self._start(call, parts.nbytes, timeout_s, post, results.restore)

    def barrier(self, *, timeout_s: float | None = None) -> asyncio.Task[Report]:
        """Wait until every rank has called it."""
        call = Call(collective=Collective.BARRIER)

        def post(round_: Round) -> None:
            nothing = dict.fromkeys(round_.peers(), _EMPTY)
            post_exchange(round_, nothing, nothing)

        return self._start(call, 0, timeout_s, post, _nothing)

    # point to point

    def send(
        self, array: Array, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> asyncio.Task[int]:
        """Send ``array`` to rank ``dst``; done, with ``dst``, when the array may be changed. ``tag``: any 64-bit integer."""
        self._check_open()
        flat = Buffer(array, "array", output=False).flat
        return self._mailbox.send(flat, dtype_of(array), dst, tag, self._timeout(timeout_s))

    def recv(
        self, array: Array, src: int | None = None, tag: int = 0, *, timeout_s: float | None = None
    ) -> asyncio.Task[int]:
        """Receive into ``array`` from rank ``src``, or with None from whichever sends first; the result is the source."""
        self._check_open()
        buffer = Buffer(array, "array", output=True)
        task = self._mailbox.receive(buffer.flat, dtype_of(array), src, tag, self._timeout(timeout_s))
        if array.flags.c_contiguous:
            return task
        return asyncio.get_running_loop().create_task(_restored(task, buffer))

    # running

    def _start(
        self,
        call: Call,
        nbytes: int,
        timeout_s: float | None,
        post: Post,
        finish: Finish,
        carrying: Carrying | None = None,
        priority: Priority | None = None,
    ) -> asyncio.Task[Report]:
        self._check_open()
        timeout_s = self._timeout(timeout_s)
        number = self._numbering.take()
        round_ = Round(
            self._endpoint,
            self._ranks,
            self._id,
            number,
            call,
            timeout_s,
            self._pool,
            self._incast,
            priority,
        )
        round_.entry = self.flight_recorder.begin(
            number.number, call.label, nbytes, lambda: _details(call, number), timeout_s, round_.states
        )
        try:
            post(round_)
        except Exception as error:
            round_.entry.fail(error, self._endpoint.time())
            self._poison(error)
            round_.end()
            if carrying is not None:
                carrying.end()
            raise
        task = asyncio.get_running_loop().create_task(self._run(round_, nbytes, finish, carrying))
        task.add_done_callback(lambda _: self._abandoned(round_))
        return task

    async def _run(self, round_: Round, nbytes: int, finish: Finish, carrying: Carrying | None) -> Report:
        try:
            await round_.received()
            await round_.sent()
            if carrying is not None:
                round_.carried, round_.discarded = carrying.settle(round_.energy_sent)
            finish()  # last: a result may have to overwrite what was sent
            return round_.report(nbytes)
        except asyncio.CancelledError:
            self._poison(self._cancelled(round_))
            raise
        except Exception as error:
            self._poison(error)
            raise
        finally:
            round_.end()
            if carrying is not None:
                carrying.end()

    def _abandoned(self, round_: Round) -> None:
        """End a round whose task was cancelled before it ran at all."""
        if not round_.ended:
            self._poison(self._cancelled(round_))
            round_.end()

    def _cancelled(self, round_: Round) -> ClosedError:
        return ClosedError(f"{round_.title} was cancelled on rank {self._endpoint.rank}")

    def _poison(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self.on_failure(error)
            self._endpoint.fail(error if isinstance(error, Exception) else ClosedError(str(error)))

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"group {self._id} failed before this call: {self._failure}") from self._failure
        if self._closed:
            raise ClosedError(f"group {self._id} was closed before this call: make a new one")

    def _timeout(self, timeout_s: float | None) -> float:
        chosen = self._timeout_s if timeout_s is None else timeout_s
        return check_timeout("timeout_s", chosen)

    # arguments

    def _reduction(
        self, array: Array, op: str | Op, policy: Policy | None, dtype: str | None, codes: bool = False
    ) -> tuple[DType, Op, Policy]:
        kind, operation = dtype_of(array, dtype), parse_op(op)
        check_op(kind, operation)
        policy = Exact() if policy is None else policy
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"policy is a {type(policy).__name__}: a Policy is needed, such as Bounded(0.1); a preset has one, "
                "preset('default').policy"
            )
        gradient = kind.kind == "f" or (codes and kind.kind == "i")
        if policy.lossy and not (gradient and operation in (Op.SUM, Op.AVG)):
            raise UnsupportedError(
                f"a budget of {policy.budget:g} on {operation.name} of {kind.name}: only sums and averages of floating-point "
                "gradients may lose anything; call without a policy"
            )
        return kind, operation, policy

    def _moving(
        self, collective: Collective, array: Array, *, count: int = 0, root: int = -1, sizes: int = 0
    ) -> Call:
        return Call(collective=collective, dtype=dtype_of(array), count=count, root=root, sizes=sizes)

    def _check_members(self, group_id: int) -> None:
        endpoint, ranks = self._endpoint, self._ranks
        if not 0 <= group_id < GROUP_LIMIT:
            raise ConfigError(f"group_id={group_id}: must lie in 0..{GROUP_LIMIT - 1}")
        if endpoint.world_size > MAX_RANKS:
            raise ConfigError(f"world_size={endpoint.world_size}: at most {MAX_RANKS} ranks are supported")
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < endpoint.world_size for rank in ranks):
            raise ConfigError(f"ranks={ranks}: different ranks in 0..{endpoint.world_size - 1} are needed")
        if endpoint.rank not in ranks:
            raise ConfigError(f"ranks={ranks}: this process is rank {endpoint.rank} and not among them")

    def _check_root(self, root: int) -> int:
        return whole("root", root, 0, self.world_size - 1, what="a rank of the group")

    def _check_size(self, name: str, flat: Array, expected: int) -> None:
        if flat.size != expected:
            raise ConfigError(
                f"{name} has {flat.size} elements on rank {self.rank}, where the other array has {expected} for it"
            )


def _details(call: Call, number: RoundNumber) -> Mapping[str, object]:
    """What the flight recorder tells of a round."""
    return details_of(call) | ({"place": place_name(number.place)} if number.place else {})


def _sizes(parts: Parts) -> int:
    return 0 if parts.even else digest_sizes(parts.sizes)


async def _restored(task: asyncio.Task[int], buffer: Buffer) -> int:
    source = await task
    buffer.restore()
    return source


def _kept_at(carry: Residual, starts: Sequence[int]) -> Callable[[int, int, Array], None]:
    """Keeps what did not reach a peer, whose part begins at ``starts[peer]``."""
    return lambda peer, first, values: carry.keep(starts[peer] + first, values)


def _ignore_failure(error: BaseException) -> None:
    """Nobody listens."""


def _ignore(first: int, count: int) -> None:
    """Nothing follows the reduce leg."""


def _nothing() -> None:
    """Nothing to finish."""
