"""``attach``: makes the gradient buckets of a DDP model bounded-loss rounds, through DDP's communication
hook.

Only here may a gradient lose anything: the backend's own collectives are always exact, because what arrives
there (parameters, buffers, the bitmap of unused parameters, a user's own calls) cannot be told from a
gradient.

Theory of operation. DDP calls the hook once a bucket, in the same order on all ranks, from the thread of the backward pass;
rounds end on completion threads, and DDP waits for all of them before backward returns. What an iteration measured is therefore
complete when the hook is called for the first bucket of the next one. There, on the backward thread, where every rank has the
same collectives before and behind, the ranks agree on the budgets (``collectives/budget.py``): an exchange from a completion
thread would race with what DDP itself sends after the last bucket (the bitmap of unused parameters). So a decision is made at the
first bucket of the iteration after the check's, and holds for it. ``no_sync`` calls no hook and makes no iteration; ranks that
have joined (``model.join()``) call it with zeros, so they count along.

Under a policy with ``carry``, each bucket has a residual, which is kept by the names of its parameters: it outlives buckets that
DDP makes anew, and stands in ``Attachment.state_dict``. Each rank saves its own.
"""

# No ``from __future__ import annotations``: DDP compares the hook's annotations with the types themselves.

import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # the class that DDP compares annotations with
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dblp.collectives.algorithms import check_policy
from dblp.collectives.budget import BudgetController
from dblp.collectives.carry import Residual
from dblp.collectives.compression.base import Method
from dblp.collectives.compression.lossy import check_lossy
from dblp.collectives.epochs import epoch_number
from dblp.collectives.joint import JointController
from dblp.collectives.named import parse_policy
from dblp.collectives.phases import Needs, Phase, Phases
from dblp.collectives.presets import Preset
from dblp.collectives.priority import Priority
from dblp.collectives.report import Report
from dblp.collectives.torch.backend import DblpProcessGroup
from dblp.collectives.torch.buckets import BucketLayout, Layouts
from dblp.collectives.torch.carries import Carries
from dblp.collectives.torch.checkpoint import RANKS, share_of
from dblp.collectives.torch.compression import (
    ModelCompression,
    check_optimizer,
    controller_of,
    method_of,
)
from dblp.collectives.torch.copied import Copied, LeftBehind, forget_copied, hooks_of
from dblp.collectives.torch.hadamard import rotate_, unrotate_
from dblp.collectives.torch.iteration import Iteration
from dblp.collectives.torch.plain import differences, plain_policy, policy_from_plain
from dblp.collectives.torch.replicas import resynchronise
from dblp.collectives.torch.summary import Summary
from dblp.errors import ConfigError, UnsupportedError
from dblp.transport.policy import Bounded, Consistency, Exact, Policy, Tags

STATE_VERSION = 5
"""Of ``Attachment.state_dict``."""
_log = logging.getLogger("dblp")
_followed: WeakSet[BudgetController] = WeakSet()
"""Controllers that follow a model: one counts the iterations of one."""
_attached: WeakSet[torch.nn.Module] = WeakSet()
"""Models that have an attachment: a model has one."""


class Attachment(LeftBehind):
    """A policy on the gradients of a DDP model, and what came of it. ``policy`` may be set between steps. A copy of the model
    has none."""

    __slots__ = (  # so that a misspelt ``attachment.polisy = ...`` is an error
        "_budget", "_carries", "_group", "_iterations", "_layouts", "_lock", "_model", "_module", "_optimizer", "_policy",
        "_priorities", "_reports", "_rounds", "_running", "_summary", "_synced_at", "compression",
    )  # fmt: skip

    def __init__(
        self,
        model: torch.nn.Module,
        group: DblpProcessGroup,
        policy: Policy,
        budget: BudgetController | None,
        optimizer: Optimizer | None,
        history: int,
        compression: ModelCompression | None = None,
    ) -> None:
        self.compression = compression
        """What compresses the gradients; None: nothing does."""
        self._model = model
        self._group = group
        self._policy = policy
        self._budget = budget
        self._optimizer = optimizer
        self._module = model.module if isinstance(model, DistributedDataParallel) else model
        self._layouts = Layouts(self._module)
        self._carries = Carries(self._layouts.sizes)
        self._reports: deque[Report] = deque(maxlen=history)
        self._summary = Summary()
        self._priorities: dict[tuple[str, ...], Priority] = {}
        self._lock = threading.Lock()  # rounds end on completion threads
        self._running: Iteration | None = None
        self._iterations = 0
        self._rounds = 0
        self._synced_at = 0
        if budget is not None:
            budget.check_names(self._layouts.names)

    def __repr__(self) -> str:
        """What it does and what came of it: for a prompt, a log or a notebook."""
        rank, world_size = self.place
        compression = "" if self.compression is None else f", compression {self.compression.method}"
        done = self.summary
        budget = f"{self._policy.budget:g}" + (" by phase" if self._budget is not None else "")
        lost = f"{done.missing_share:.2%} missing, {done.retransmitted_share:.2%} sent again"
        return (
            f"<{type(self).__name__} rank {rank} of {world_size}: budget {budget}"
            f"{compression}; {done.rounds} rounds, {lost}>"
        )

    @property
    def policy(self) -> Policy:
        """The policy of the next buckets; set it on all ranks alike, between steps. A controller replaces its budgets."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        checked = base_policy(self._check(policy), self._budget, self.compression)
        if self.compression is not None:
            _check_lossy(self.compression.method, checked, self._group, self._budget)
        self._policy = checked

    @property
    def budget(self) -> BudgetController | None:
        """The controller of the budgets."""
        return self._budget

    @property
    def phases(self) -> Phases | None:
        """The phases as last decided; None without a controller."""
        return None if self._budget is None else self._budget.phases

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

    @property
    def groups(self) -> tuple[DblpProcessGroup, ...]:
        """The process groups that together hold all ranks that train the model: one, or one for each dimension of a mesh."""
        return (self._group,)

    @property
    def place(self) -> tuple[int, int]:
        """This rank among all that train the model, and their number."""
        rank, world_size = 0, 1
        for group in reversed(self.groups):
            rank, world_size = rank * group.size() + group.rank(), world_size * group.size()
        return rank, world_size

    def epoch(self, number: int | None = None) -> None:
        """An epoch begins: call it on all ranks before its first iteration, with the epoch's number or without.

        Without a controller or a compression that has a warm-up it does nothing. Raises ConfigError for a number below the
        running epoch's, or for what is none.
        """
        if number is not None:
            number = epoch_number(number)
        if self.compression is not None:
            self.compression.epoch(number)
        if self._budget is not None:
            self._budget.epoch(number)

    def note(
        self,
        *,
        learning_rate: float | None = None,
        metric: float | None = None,
        phase: Phase | str | None = None,
    ) -> None:
        """Tell the next check a learning rate, an evaluation metric or a wanted phase; one rank may know them alone.

        Raises ConfigError without a controller, and for what none of its detectors looks at.
        """
        if self._budget is None:
            raise ConfigError(
                "note(): no controller listens; give dblp.attach a budget=BudgetController(...)"
            )
        self._budget.note(learning_rate=learning_rate, metric=metric, phase=phase)

    def resynchronise(self) -> float:
        """Give all ranks the parameters of rank 0, now; call it on all ranks, between iterations. Returns the drift that was
        found: the L2 norm of the difference over that of the parameters, of the rank that was farthest off."""
        drift = resynchronise(self._group, self._module.parameters())
        self._synced_at = self._iterations
        with self._lock:
            self._summary = self._summary.resynchronised(drift)
        return drift

    def state_dict(self) -> dict[str, Any]:
        """All that the next rounds depend on, and the totals, as plain values and tensors for this rank's checkpoint; take it
        between iterations. The reports are not part of it."""
        self._settle()
        summary = self.summary
        return {
            "version": STATE_VERSION,
            "policy": plain_policy(self._policy),
            "summary": {name: getattr(summary, name) for name in Summary.__dataclass_fields__},
            "budget": None if self._budget is None else self._budget.state_dict(),
            "carry": self._carries.state_dict(),
            "compression": None if self.compression is None else self.compression.state_dict(),
            "iterations": self._iterations,
            "rounds": self._rounds,
            "synced_at": self._synced_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, or this rank's part of what ``merge_states`` made of those of all ranks. Raises
        ConfigError if it is not usable, if it is of another model, or if one has a controller and the other has none.

        The saved policy holds from here on, as a learning rate does in ``torch.optim``; where it is not the one that this
        attachment had, rank 0 says so in a warning that names both. Set ``policy`` afterwards to have another."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"this is no state of dblp.attach, but a {type(state).__name__}")
        if RANKS in state:
            state = share_of(state, *self.place)
        try:
            if int(state["version"]) > STATE_VERSION:
                raise ConfigError(
                    f"a state of dblp.attach of version {state['version']!r}: a later dblp wrote it; this one reads up to "
                    f"{STATE_VERSION}: install the later one"
                )
            policy, summary = policy_from_plain(state["policy"]), Summary(**state["summary"])
            counts = int(state["iterations"]), int(state["rounds"]), int(state["synced_at"])
            budget, carry, compression = state["budget"], state["carry"], state.get("compression")
        except ConfigError:
            raise  # it says by itself what is wrong
        except KeyError as error:
            raise ConfigError(f"this is no state of dblp.attach: it has no {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of dblp.attach: {error!r}") from None
        if (budget is None) != (self._budget is None):
            has, lacks = ("the state", "attach was given") if budget else ("attach", "the state has")
            raise ConfigError(f"{has} has a budget controller, {lacks} none: resume with what was saved")
        self._check(policy)
        if self.compression is not None:
            _check_lossy(self.compression.method, policy, self._group, self._budget)
        if (compression is None) != (self.compression is None):
            has, lacks = ("the state", "attach was given") if compression else ("attach", "the state has")
            raise ConfigError(f"{has} has a compression, {lacks} none: resume with what was saved")
        carries = self._carries.loaded(carry)
        if self.compression is not None:
            self.compression.load_state_dict(compression or {})
        if self._budget is not None:
            self._budget.load_state_dict(budget)
        if policy != self._policy and self.place[0] == 0:
            saved, given = differences(policy, self._policy)
            _log.warning(
                "load_state_dict: the saved policy holds, %s, not what attach was given, %s; to have that, set it again "
                "after loading: attachment.policy = ...",
                saved,
                given,
            )
        self._policy, self._carries = policy, carries
        self._iterations, self._rounds, self._synced_at = counts
        self._running = None
        with self._lock:
            self._summary = summary
            self._reports.clear()

    # called by the hooks

    def begin_round(self, bucket: GradBucket) -> tuple[Iteration, BucketLayout, Policy, Residual | None]:
        """A bucket is ready: its iteration, its layout, its policy and what it carries. The first of an iteration ends the one
        before."""
        if self._running is None or self._running.launched_all:
            self._begin_iteration()
        assert self._running is not None
        layout, policy = self._layouts.of(bucket), self._policy
        if self._budget is not None:
            policy = self._budget.policy(policy, layout.names)
        # A compression has one residual, its method's, which what was lost joins.
        carry = None if self.compression is not None else self._carries.of(bucket.buffer(), layout, policy)
        self._running.launch(bucket.is_last())
        return self._running, layout, policy, carry

    def rotate(self, tensor: torch.Tensor, policy: Policy) -> int | None:
        """Rotate a bucket's flat gradient before its round if the policy says so; returns the seed that turns it back, another
        one in each round and the same on all ranks."""
        self._rounds += 1
        if not policy.hadamard or not tensor.is_floating_point():
            return None
        rotate_(tensor, self._rounds)
        return self._rounds

    def priority_of(self, layout: BucketLayout, policy: Policy) -> Priority | None:
        """What is known of a bucket's chunks; None if the policy does not tag them. Counts of what was missing start anew when
        DDP makes its buckets anew."""
        if policy.tags is Tags.NONE:
            return None
        if layout.names not in self._priorities:
            self._priorities[layout.names] = Priority(layout)
        return self._priorities[layout.names]

    def end_round(self, iteration: Iteration, report: Report | None) -> None:
        """A round has ended well; on a completion thread."""
        if report is None:
            return
        with self._lock:
            self._reports.append(report)
            self._summary = self._summary.plus(report)
            iteration.reports.append(report)

    def before_forward(self, model: torch.nn.Module) -> None:
        """A forward pass begins. Replicas that may drift are made equal here, where no saved tensor of a graph is in use."""
        policy = self._policy
        if policy.consistency is not Consistency.RELAXED or not policy.resync_rounds:
            return
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._iterations - self._synced_at < policy.resync_rounds:
            return
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise UnsupportedError(
                "Consistency.RELAXED resynchronises in the forward pass, which ranks that have joined do not run: use "
                "resync_rounds=0 within model.join(), and attachment.resynchronise() after it"
            )
        self.resynchronise()

    # inside

    def _check(self, policy: object) -> Policy:
        """Raise what ``attach`` raises for a policy that cannot be used here."""
        return _checked(policy, self._group, self._budget)

    def _agree(self, vector: npt.NDArray[np.float64]) -> None:
        """Reduce a short vector by MAX over all ranks that train the model."""
        for group in self.groups:
            group.agree(vector)

    def _begin_iteration(self) -> None:
        self._settle()
        self._running = None
        if self._budget is not None:
            self._decide(self._budget)
            self._budget.begin_iteration()
        measures = Needs.NOTHING if self._budget is None else self._budget.measures
        self._running = Iteration(measures)
        self._iterations += 1

    def _decide(self, budget: BudgetController) -> None:
        if self._optimizer is not None and Needs.LEARNING_RATE in budget.detector.needs:
            budget.note(learning_rate=max(float(group["lr"]) for group in self._optimizer.param_groups))
        if (vector := budget.vector_to_agree()) is not None:
            self._agree(vector)
            budget.decide(vector)

    def _settle(self) -> None:
        """Tell the controller what the last iteration measured, once, if it is complete."""
        running, budget = self._running, self._budget
        if running is None or budget is None or not running.launched_all or running.settled:
            return
        running.settled = True
        for report in running.reports:
            budget.hear(report)
        budget.end_iteration(norm=running.norm, layer_norms=running.layer_norms)


def attach(
    model: torch.nn.Module,
    policy: Policy | Preset | str | None = None,
    *,
    budget: BudgetController | None = None,
    optimizer: Optimizer | None = None,
    history: int = 1024,
    compression: Method | str | None = None,
) -> Attachment:
    """Average the gradients of ``model`` over the network under ``policy``: a policy, a preset, or one as a string (default:
    exact, or with a ``budget`` what ``Bounded`` makes: what is lost is carried; ``named.py``). A preset's own controller is taken
    where ``budget`` gives none.

    Call it once, after wrapping the model and before the first backward pass, on all ranks alike.
    ``budget``: a controller whose budgets follow the training phase; they replace those of ``policy``. ``optimizer``: where
    detectors find the learning rate. ``history``: reports to keep. ``compression``: a method, or a string such as
    ``"topk(ratio=0.01)"`` (docs/compression.md). A model that ``fully_shard`` has sharded (FSDP2) gets bounded
    reduce-scatters (``sharded.py``). Raises UnsupportedError if the model is neither that nor wrapped in
    DistributedDataParallel, if its process group is not of the backend "dblp", or if the policy's algorithm can't do what the
    policy asks for; ConfigError for what is no policy, controller, optimizer, algorithm or number of reports, for a model with
    a hook, for a controller that follows another model, and for name patterns that fit no parameter.
    """
    if is_fully_sharded(model):
        from dblp.collectives.torch.sharded import attach_sharded  # needs a torch that has FSDP2's hook

        return attach_sharded(model, policy, budget, optimizer, history, compression)
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"dblp.attach takes a model wrapped in DistributedDataParallel or sharded by fully_shard, not "
            f"{type(model).__name__}; wrap it first: model = DistributedDataParallel(model)"
        )
    group = model.process_group
    if not isinstance(group, DblpProcessGroup):
        raise UnsupportedError(
            f"dblp.attach needs a process group of the backend 'dblp', not {_backend_name(group)!r}; call "
            "torch.distributed.init_process_group('dblp'), or pass "
            "DistributedDataParallel(..., process_group=torch.distributed.new_group(backend='dblp'))"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedError(
            "dblp.attach with torch._dynamo.config.optimize_ddp='python_reducer': that reducer has no buckets to hook; use "
            "'ddp_optimizer', torch's default, or no attachment"
        )
    policy, budget = policy_and_budget(policy, budget, group)
    check_others(model, optimizer, history)
    checked = _checked(base_policy(policy, budget, compression), group, budget)
    compressing = None
    if compression is None and isinstance(budget, JointController):
        raise ConfigError(
            "a JointController without compression: give compression='joint', whose ratio it decides"
        )
    if compression is not None:
        method = method_of(compression)
        check_optimizer(method, optimizer)
        budget = controller_of(method, budget, optimizer, checked)
        _check_lossy(method, checked, group, budget)
        compressing = ModelCompression(group, method, model.module)
    attachment = Attachment(model, group, checked, budget, optimizer, history, compressing)
    forget_copied(model)
    model.register_comm_hook(attachment, _hook)
    model.register_forward_pre_hook(functools.partial(_before_forward, attachment))
    remember(model, budget)
    return attachment


def is_fully_sharded(model: object) -> bool:
    """True for a module that FSDP2's ``fully_shard`` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever has one
    return isinstance(model, getattr(fsdp, "FSDPModule", ()))


def policy_and_budget(
    policy: Policy | Preset | str | None, budget: BudgetController | None, group: DblpProcessGroup
) -> tuple[Policy | None, BudgetController | None]:
    """What ``attach`` was given, presets taken apart. Raises ConfigError for a controller that cannot be used."""
    if isinstance(policy, str):
        policy = parse_policy(policy)
    if isinstance(policy, Preset):
        _check_transport(policy, group)
        budget = policy.controller() if budget is None and policy.controller is not None else budget
        policy = policy.policy
    _check_controller(budget)
    return policy, budget


def base_policy(policy: Policy | None, budget: BudgetController | None, compression: object) -> Policy:
    """The policy whose budgets a controller moves: with none given one that carries what is lost. Raises ConfigError for an exact
    one under a controller, which would lose gradient and throw it away."""
    if budget is None or compression is not None:
        return Policy() if policy is None else policy
    if policy is None:
        return Bounded(budget.budgets.low)
    if policy == Exact():
        raise ConfigError(
            "an exact policy with a controller, whose budgets replace the policy's: give dblp.Bounded(p), which carries what is "
            "lost, or dblp.Policy(budget=p), which discards it, or leave the controller out"
        )
    return policy


def remember(model: torch.nn.Module, budget: BudgetController | None) -> None:
    """Model and controller are taken from now on."""
    _attached.add(model)
    if budget is not None:
        _followed.add(budget)


def _before_forward(attachment: Attachment | Copied, model: torch.nn.Module, _: Any) -> None:
    """Called before each forward pass, of a copy too."""
    if isinstance(attachment, Attachment):
        attachment.before_forward(model)


def _hook(state: Attachment, bucket: GradBucket) -> Future[torch.Tensor]:
    """Start the round of one bucket; DDP requires the parameter's name."""
    iteration, layout, policy, carry = state.begin_round(bucket)
    seed = state.rotate(bucket.buffer(), policy)
    if state.compression is not None:
        iteration.measure(bucket.buffer(), layout)  # what is delivered has a norm of the compression's making
        ratio = state.budget.ratio if isinstance(state.budget, JointController) else None
        number = state._iterations - 1
        work = state.compression.start(bucket, layout, number, state.phases, policy, ratio)
    else:
        priority = state.priority_of(layout, policy)
        work = state._group.allreduce_lossy(bucket.buffer(), policy, carry=carry, priority=priority)

    def ended(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        tensor = future.value()[0]  # raises the round's error
        if seed is not None:
            unrotate_(tensor, seed)
        if state.compression is None:
            iteration.measure(tensor, layout)
        state.end_round(iteration, work.report)
        return tensor

    return work.get_future().then(ended)


def _checked(policy: object, group: DblpProcessGroup, budget: BudgetController | None) -> Policy:
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy is a {type(policy).__name__}: use a dblp.Policy, such as dblp.Bounded(0.1) or dblp.Exact(); a preset has "
            "one, dblp.preset('default').policy, and attach takes the name of a preset, too"
        )
    _check_algorithm(policy, group, budget)
    return policy


def _check_algorithm(policy: Policy, group: DblpProcessGroup, budget: BudgetController | None) -> None:
    """Now, and not in the first backward pass, nor when a controller first allows to lose anything."""
    check_policy(policy, group.size())
    if budget is not None:
        budget.check_base(policy)
        check_policy(budget.loosest(policy), group.size())


def _check_lossy(
    method: Method, policy: Policy, group: DblpProcessGroup, budget: BudgetController | None
) -> None:
    """Refuse a policy that compressed rounds cannot keep, now and whatever a controller makes of it."""
    check_lossy(policy, method, group.size())
    if budget is not None:
        check_lossy(budget.loosest(policy), method, group.size())


def check_others(model: torch.nn.Module, optimizer: object, history: object) -> None:
    if model in _attached:
        raise ConfigError(
            "this model has an attachment already; keep what the first dblp.attach returned, and set its policy to change it"
        )
    if hooks := hooks_of(model):
        names = ", ".join(getattr(hook, "__qualname__", repr(hook)) for hook, _ in hooks)
        raise ConfigError(
            f"this model has the communication hook {names}, and DDP takes one: wrap it anew to attach a policy"
        )
    if isinstance(history, bool) or not isinstance(history, int) or history < 0:
        raise ConfigError(f"history={history!r}: a number of reports to keep is needed, 0 for none")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: a torch optimizer is needed, or None")


def _check_transport(wanted: Preset, group: DblpProcessGroup) -> None:
    """Say so if the group's transport is not as the preset has it: it was opened before."""
    config = group.session.config
    others = {name: value for name, value in wanted.transport.items() if getattr(config, name) != value}
    if others:
        variables = " ".join(f"DBLP_{name.upper()}={value}" for name, value in others.items())
        _log.warning(
            "preset %r asks for %s: set it before init_process_group on all ranks", wanted.name, variables
        )


def _check_controller(budget: object) -> None:
    if budget is None:
        return
    if not isinstance(budget, BudgetController):
        raise ConfigError(
            f"budget={budget!r}: use a dblp.BudgetController; a fixed budget belongs into the policy, as in dblp.Bounded(0.1)"
        )
    if budget in _followed:
        raise ConfigError("this BudgetController already follows a model: make one for each")


def _backend_name(group: Any) -> str:
    try:
        return str(dist.get_backend(group))
    except (ValueError, RuntimeError):
        return type(group).__name__
