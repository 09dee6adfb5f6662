"""``attach``: makes the gradient buckets of a DDP model bounded-loss rounds, through DDP's communication
hook.

Only here may a gradient lose anything: the backend's own collectives are always exact, because what arrives
there (parameters, buffers, the bitmap of unused parameters, a user's own calls) cannot be told from a
gradient.
"""

# No ``from __future__ import annotations``: DDP compares the hook's annotations with the types themselves.

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # the class that DDP compares annotations with
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dblp.collectives.report import Report
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What all gradient rounds of an attachment cost and lost, as this rank saw it."""

    rounds: int = 0
    """Gradient rounds (buckets) so far."""
    lossy_rounds: int = 0
    """Those that missed at least one chunk."""
    missing_chunks: int = 0
    """Chunks of peers' gradients that did not arrive and were not waited for."""
    bounded_chunks: int = 0
    """Chunks of peers' gradients that were allowed to miss."""
    energy_lost_sum: float = 0.0
    """Sum over the rounds of the share of the gradient's energy that was lost."""
    chunks_sent: int = 0
    """First transmissions."""
    chunks_resent: int = 0
    """Retransmissions."""
    seconds: float = 0.0
    """Sum of the rounds' durations; rounds overlap, so this may exceed the wall time."""

    @property
    def missing_share(self) -> float:
        """Missing chunks over those that were allowed to miss, in [0, 1)."""
        return self.missing_chunks / self.bounded_chunks if self.bounded_chunks else 0.0

    @property
    def energy_lost(self) -> float:
        """Mean over the rounds of the share of the gradient's energy that was lost, in [0, 1]."""
        return self.energy_lost_sum / self.rounds if self.rounds else 0.0

    @property
    def retransmitted_share(self) -> float:
        """Retransmissions over first transmissions."""
        return self.chunks_resent / self.chunks_sent if self.chunks_sent else 0.0

    def plus(self, report: Report) -> "Summary":
        """With one more round."""
        return Summary(
            rounds=self.rounds + 1,
            lossy_rounds=self.lossy_rounds + (report.missing_chunks > 0),
            missing_chunks=self.missing_chunks + report.missing_chunks,
            bounded_chunks=self.bounded_chunks + report.bounded_chunks,
            energy_lost_sum=self.energy_lost_sum + report.energy_lost,
            chunks_sent=self.chunks_sent + report.chunks_sent,
            chunks_resent=self.chunks_resent + report.chunks_resent,
            seconds=self.seconds + report.duration_s,
        )

    def __str__(self) -> str:
        return (
            f"{self.rounds} gradient rounds: missing {self.missing_share:.2%} of chunks "
            f"({self.energy_lost:.2%} of "
            f"energy), resent {self.retransmitted_share:.2%}"
        )


class Attachment:
    """A policy on the gradients of a DDP model, and what came of it. ``policy`` may be set between steps."""

    def __init__(self, group: DblpProcessGroup, policy: Policy, history: int) -> None:
        self._group = group
        self._policy = policy
        self._reports: deque[Report] = deque(maxlen=history)
        self._summary = Summary()
        self._lock = threading.Lock()  # rounds end on completion threads

    @property
    def policy(self) -> Policy:
        """The policy of the next buckets; set it on all ranks alike, between steps."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = _checked(policy)

    @property
    def reports(self) -> Sequence[Report]:
        """Reports of the last rounds, oldest first; at most as many as ``attach`` was told to keep."""
        with self._lock:
            return tuple(self._reports)

    @property
    def summary(self) -> Summary:
        """Totals over all rounds."""
        with self._lock:
            return self._summary

    def state_dict(self) -> dict[str, Any]:
        """The policy and the totals, as plain values for a checkpoint; the reports are not part of it."""
        policy, summary = self._policy, self.summary
        return {
            "version": 1,
            "policy": {name: _plain(getattr(policy, name)) for name in Policy.__dataclass_fields__},
            "summary": {name: getattr(summary, name) for name in Summary.__dataclass_fields__},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the policy and the totals of ``state_dict``; raises ConfigError if they are not usable."""
        try:
            values = {name: _typed(name, value) for name, value in state["policy"].items()}
            policy, summary = Policy(**values), Summary(**state["summary"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of dblp.attach: {error!r}") from None
        self._policy = policy
        with self._lock:
            self._summary = summary
            self._reports.clear()

    def _record(self, report: Report | None) -> None:
        if report is None:
            return
        with self._lock:
            self._reports.append(report)
            self._summary = self._summary.plus(report)


def attach(
    model: DistributedDataParallel, policy: Policy | None = None, *, history: int = 1024
) -> Attachment:
    """Average the gradients of ``model`` over the network under ``policy`` (default: exact).

    Call it once, after wrapping the model and before the first backward pass, on all ranks alike.
    ``history``: reports to keep. Raises UnsupportedError if the model is not wrapped in
    DistributedDataParallel or its process group is not of the backend "dblp", ConfigError for what is no
    policy.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"dblp.attach takes a model wrapped in DistributedDataParallel, not {type(model).__name__}; "
            "wrap it first: model = DistributedDataParallel(model)"
        )
    group = model.process_group
    if not isinstance(group, DblpProcessGroup):
        raise UnsupportedError(
            f"dblp.attach needs a process group of the backend 'dblp', not {_backend_name(group)!r}; call "
            "torch.distributed.init_process_group('dblp'), or pass "
            "DistributedDataParallel(..., process_group=torch.distributed.new_group(backend='dblp'))"
        )
    attachment = Attachment(group, _checked(policy if policy is not None else Policy()), history)
    model.register_comm_hook(attachment, _hook)
    return attachment


def _hook(state: Attachment, bucket: GradBucket) -> Future[torch.Tensor]:
    """Start the round of one bucket; DDP requires the parameter's name."""
    work = state._group.allreduce_lossy(bucket.buffer(), state._policy)

    def ended(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        tensor = future.value()[0]  # raises the round's error
        state._record(work.report)
        return tensor

    return work.get_future().then(ended)


def _checked(policy: object) -> Policy:
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy={policy!r}: use a dblp.Policy, such as dblp.Bounded(0.1) or dblp.Exact()")
    return policy


def _backend_name(group: Any) -> str:
    try:
        return str(dist.get_backend(group))
    except (ValueError, RuntimeError):
        return type(group).__name__


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # enums by their value


def _typed(name: str, value: Any) -> Any:
    default = getattr(Policy(), name)
    return type(default)(value)
