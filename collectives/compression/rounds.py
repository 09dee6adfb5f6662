"""One model's compressed rounds on one rank: the order of their steps, and all state that they leave.

Theory of operation. Several buckets may be under way. Each takes its turn, in the order of the calls, until it has posted its
last round: so all ranks post the rounds of a group in one order, though a method may need several of them. What comes is waited
for and decompressed outside the turn. Heavy steps are handed to ``offload``, so that an event loop that also serves the network
is not held up; the default runs them at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dblp.collectives.carry import NOTHING, Account
from dblp.collectives.compression.base import Array, Bucket, Job, Method, narrowed, widened
from dblp.collectives.compression.curve import energy_curve
from dblp.collectives.compression.link import ExactRounds, Link
from dblp.collectives.compression.lossy import account, check_lossy, split_lost
from dblp.collectives.compression.memory import Memory, MemoryStore
from dblp.collectives.epochs import epoch_number
from dblp.collectives.group import Group
from dblp.collectives.phases import Phases
from dblp.collectives.reduction import DTYPES, dtype_of, energy
from dblp.collectives.report import Report
from dblp.errors import ConfigError, MismatchError, UnsupportedError
from dblp.transport.policy import Policy

T = TypeVar("T")
_log = logging.getLogger("dblp")
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
"""``await offload(step)``: run a step and give its result."""

STATE_VERSION = 1
"""Of ``Compression.state_dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all rounds of a compression cost, on this rank."""

    rounds: int = 0
    spoiled: int = 0
    """Rounds whose average is NaN, because some rank's values were not finite."""
    dense_bytes: int = 0
    """Of the gradients, in their own type."""
    payload_bytes: int = 0
    """What this rank put into its rounds: the size of the compressed gradients, as papers count it."""
    wire_bytes: int = 0
    """What this rank sent: chunks to all peers with their headers, repeats included, without control datagrams."""

    @property
    def ratio(self) -> float:
        """Gradient size over compressed size, as papers count it."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else 1.0


async def _at_once(step: Callable[[], T]) -> T:
    return step()


@dataclass(slots=True)
class Books:
    """What became of one round's values, on this rank."""

    energy: float = 0.0
    """Sum of squares of gradient and residual."""
    withheld: float = 0.0
    curves: bool = False
    """A controller wants the curve."""
    curve: tuple[float, ...] = ()
    carried: Account = NOTHING
    discarded: Account = NOTHING


class Compression:
    """A method, and what it keeps of a model's buckets."""

    def __init__(self, method: Method, *, seed: int = 0, offload: Offload = _at_once) -> None:
        """``seed``: of all random choices, the same on all ranks."""
        self.method = method
        self.totals = Totals()
        self.on_discard: Callable[[Array], None] | None = None
        """Told what each round under a loss policy discards, (size,)."""
        self._seed = seed
        self._offload = offload
        self._memories = MemoryStore()
        self._factors: dict[str, Array] = {}
        self._measured: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._rounds = 0
        self._epoch = -1

    @property
    def figures(self) -> dict[str, float]:
        """What the method has decided and found, by name; the same on all ranks. Most methods have none."""
        return self.method.figures(self._factors)

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins; without a number the next one, 0 at first. Raises ConfigError for a number below the running one's, or
        for what is none."""
        number = self._epoch + 1 if number is None else epoch_number(number)
        if number < self._epoch:
            raise ConfigError(f"epoch({number}): epoch {self._epoch} is running, epochs only go on")
        self._epoch = number

    async def all_reduce(
        self,
        group: ExactRounds,
        gradient: Array,
        bucket: Bucket,
        *,
        timeout_s: float,
        iteration: int = 0,
        phases: Phases | None = None,
        dtype: str | None = None,
        policy: Policy | None = None,
        weigh: bool = False,
        ratio: float | None = None,
    ) -> Report:
        """Average ``gradient`` (1-D, contiguous, the bucket's size) over the group, compressed, in place; all ranks call it for
        the same buckets in the same order, with nothing else on the group. ``iteration``: backward passes before this one;
        ``phases``: of the training, the same on all ranks (critical); ``dtype``: as in ``Group.all_reduce``.
        ``policy``: what the round may lose (``lossy.py``); ``weigh``: measure ``Report.energy_withheld`` without one, too, and
        ``Report.energy_curve``; ``ratio``: the share of elements to send, for methods that follow a controller.

        Raises ConfigError and UnsupportedError for a gradient or a group that does not fit, which costs nothing. Raises what the
        group's rounds raise, and MismatchError for a peer's payload that makes no sense: then the group has failed.
        """
        if policy is not None:
            check_lossy(policy, self.method, group.world_size)
            if policy.lossy and not isinstance(group, Group):
                raise UnsupportedError(
                    f"compression {self.method.name!r}: only dblp's own groups have rounds that may lose something; "
                    "use an exact policy"
                )
        if self._rounds == 0 and self._epoch < 0 and self.method.waits_for_epochs:
            _log.warning(
                "compression %s has a warm-up, and no epoch was told: it stays in the first until attachment.epoch(number) is "
                "called before each, or epoch_steps= counts them", self.method,
            )  # fmt: skip
        job = self._job(group, gradient, bucket, iteration, dtype)
        job.phases = job.phases if phases is None else phases
        if policy is not None and policy.lossy and group.world_size > 1:
            job.lossy = policy
        job.ratio = ratio
        books = Books(curves=weigh) if weigh or job.lossy is not None else None
        try:
            return await self._run(job, Link(group, timeout_s, job.lossy), books)
        except Exception as error:
            told = self._with_epoch(error)
            group.fail(told)  # peers may not have seen it: they need not wait for their deadlines
            if told is error:
                raise
            raise told from error
        finally:
            job.memory.busy = False
            self.method.ended(job)

    def _with_epoch(self, error: Exception) -> Exception:
        """Ranks that were told different epochs send different shares, and see sizes that differ."""
        if not (isinstance(error, MismatchError) and self.method.waits_for_epochs):
            return error
        return MismatchError(
            f"{error} ({self.method.name} is in epoch {max(self._epoch, 0)} of its warm-up here: attachment.epoch(number) must "
            "tell all ranks the same)",
            error.ranks,
        )

    async def _run(self, job: Job, link: Link, books: Books | None) -> Report:
        method = self.method
        async with self._turn:
            await self._offload(lambda: self._begin(job, books))
            await method.agree(job, link)
            sent = await self._offload(lambda: method.compress(job))
            coming = await method.exchange(job, sent, link)
        received = await coming
        await self._offload(lambda: self._end(job, sent, received, books))
        self._count(job, link)
        return self._report(job, link, books or Books())

    def _begin(self, job: Job, books: Books | None) -> None:
        self.method.begin(job, widened(job.gradient, job.kind, job.memory.dtype))
        if books is not None:
            books.energy = energy(job.values, DTYPES[job.values.dtype.name])
            books.curve = energy_curve(job.bucket, job.values) if books.curves else ()

    def _end(self, job: Job, sent: Array, received: list[Array], books: Books | None) -> None:
        average = self.method.decompress(job, received)
        if average is not job.gradient:
            job.gradient[...] = narrowed(average, job.kind)
        if job.lossy is not None and books is not None:
            self._take_back(job, job.lossy, sent, books)
        if books is not None:
            held = energy(job.values, DTYPES[job.values.dtype.name])
            books.withheld = min(held / books.energy, 1.0) if books.energy > 0.0 else 0.0

    def _take_back(self, job: Job, policy: Policy, sent: Array, books: Books) -> None:
        """What was not counted joins the residual; what that is and what is dropped goes into the books."""
        method, memory = self.method, job.memory
        keeps = memory.residual is not None
        lost = method.uncounted(job, sent)
        kept = dropped = None
        if lost is not None:
            kept, dropped = split_lost(lost, policy, keeps=keeps, withholds=method.withholds)
        if kept is not None and memory.residual is not None:
            memory.residual += kept
        books.discarded = account(dropped)
        if dropped is not None and self.on_discard is not None:
            self.on_discard(dropped)
        if not keeps and method.withholds:
            books.discarded += account(job.values)
            if self.on_discard is not None:
                self.on_discard(job.values)
        books.carried = account(memory.residual)

    def _job(
        self, group: ExactRounds, gradient: Array, bucket: Bucket, iteration: int, dtype: str | None
    ) -> Job:
        kind = dtype_of(gradient, dtype)
        if kind.kind != "f":
            raise UnsupportedError(
                f"compression of a {kind.name} gradient: only real floating-point gradients are compressed"
            )
        if gradient.shape != (bucket.size,) or not gradient.flags.c_contiguous:
            raise ConfigError(
                f"a gradient of shape {gradient.shape} for a bucket of {bucket.size} elements: it must be flat and contiguous"
            )
        self.method.check(group.world_size)
        memory: Memory = self._memories.of(bucket.layout, "float64" if kind.name == "float64" else "float32")
        if memory.busy:
            raise ConfigError("compression: a round of this bucket is still under way; wait for it first")
        memory.busy = True
        self._rounds += 1
        return Job(
            bucket=bucket,
            memory=memory,
            gradient=gradient,
            kind=kind,
            rank=group.rank,
            world_size=group.world_size,
            number=self._rounds,
            iteration=iteration,
            epoch=max(self._epoch, 0),
            seed=self._seed,
            factors=self._factors,
            measured=self._measured,
            max_chunk_bytes=group.max_chunk_bytes,
        )

    def _count(self, job: Job, link: Link) -> None:
        totals = self.totals
        self.totals = replace(
            totals,
            rounds=totals.rounds + 1,
            spoiled=totals.spoiled + job.spoiled,
            dense_bytes=totals.dense_bytes + job.gradient.nbytes,
            payload_bytes=totals.payload_bytes + link.payload_bytes,
            wire_bytes=totals.wire_bytes + sum(report.bytes_sent for report in link.reports),
        )

    def _report(self, job: Job, link: Link, books: Books) -> Report:
        """The rounds of one bucket as one."""
        last = link.reports[-1]
        bounded = [report for report in link.reports if report.bounded_chunks]
        counts = ("chunks_sent", "chunks_resent", "chunks_received", "chunks_duplicate", "bytes_sent")
        return replace(
            last,
            **{name: sum(getattr(report, name) for report in link.reports) for name in counts},
            collective="all_reduce",
            algorithm=self.method.name,
            reason=f"compression {self.method}",
            nbytes=job.gradient.nbytes,
            duration_s=link.elapsed_s,
            missing=_missing(bounded),
            bounded_chunks=sum(report.bounded_chunks for report in bounded),
            energy_lost=job.notes.get("energy_lost", _energy_lost(bounded)),
            filled_chunks=sum(report.filled_chunks for report in link.reports),
            budget=job.lossy.budget if job.lossy is not None else 0.0,
            skipped=any(report.skipped for report in link.reports),
            carries=job.lossy is not None and job.memory.residual is not None,
            bound="" if job.lossy is None or job.lossy.carry is None else job.lossy.carry.bound.value,
            carried=books.carried,
            discarded=books.discarded,
            energy_withheld=books.withheld,
            energy_curve=books.curve,
        )

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds of this rank depend on, in numpy arrays and plain values; take it between iterations."""
        return {
            "version": STATE_VERSION,
            "method": str(self.method),
            "rounds": self._rounds,
            "epoch": self._epoch,
            "seed": self._seed,
            "memory": self._memories.state_dict(),
            "factors": {name: factor.copy() for name, factor in self._factors.items()},
            "totals": {name: getattr(self.totals, name) for name in Totals.__dataclass_fields__},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, whatever the buckets were. Raises ConfigError if it is not usable, or of another method
        (other options of the same method will do); what was held before is then left alone."""
        try:
            if state["version"] != STATE_VERSION:
                raise ConfigError(
                    f"compression: a state of version {state['version']!r}; this version reads {STATE_VERSION}"
                )
            name = str(state["method"]).partition("(")[0]
            counts = int(state["rounds"]), int(state["epoch"]), int(state["seed"])
            factors = {str(key): np.array(factor) for key, factor in state["factors"].items()}
            totals = Totals(**state["totals"])
            memories = MemoryStore()
            memories.load_state_dict(state["memory"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"this is no state of a compression: {error!r}") from None
        if name != self.method.name:
            raise ConfigError(
                f"compression: the state is of {name!r}, this method is {self.method.name!r}: resume with what was saved"
            )
        self._rounds, self._epoch, self._seed = counts
        self._memories, self._factors, self.totals = memories, factors, totals
        self._measured.clear()


def _missing(reports: Sequence[Report]) -> dict[int, Any]:
    """By peer, the missing chunks of all rounds, counted on from round to round."""
    found: dict[int, list[Any]] = {}
    low = 0
    for report in reports:
        for peer, chunks in report.missing.items():
            found.setdefault(peer, []).append(chunks + low)
        low += report.bounded_chunks
    return {peer: np.concatenate(chunks) for peer, chunks in found.items()}


def _energy_lost(reports: Sequence[Report]) -> float:
    """The mean share, weighed by chunks."""
    chunks = sum(report.bounded_chunks for report in reports)
    return sum(report.energy_lost * report.bounded_chunks for report in reports) / chunks if chunks else 0.0
