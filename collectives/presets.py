"""Presets: every published mechanism of this kind as a named policy, and dblp's own default.

A preset holds a ``Policy``, the controller that moves its budgets with the training phase (if it has one), and what it asks of
the transport. Constants are those of the papers; where a paper does not give one, the value here is a choice, named among the
preset's ``differences`` and a setting of ``preset``. docs/policies.md has the same as a table.

Budgets of a leg. DBLP, MLT and LTP bound what a receiver may miss in each message, so a share p on both legs loses
1 - (1 - p)^2 end to end, and ``Policy`` counts end to end (``end_to_end``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any

from dblp.collectives.budget import DBLP_LOW, DBLP_STEP, BudgetController, Budgets, Interval
from dblp.collectives.phases import ETA, NormChange, check_eta
from dblp.errors import ConfigError, did_you_mean
from dblp.transport.config import TransportConfig
from dblp.transport.policy import Carry, Consistency, Policy, Short, Stop, Tags

DEFAULT_LEG = 0.7
"""Share of each leg's chunks that ``default`` may miss; under ``Consistency.AGREED`` the gather leg's holds for the union of
all ranks' holes. Only a network that loses as much uses it up: the stall rule waits for all that is on its way, and what is
lost is carried."""
LTP_SHARE = 0.2
"""Share of a push that LTP's receiver may close without; the paper's number is not published."""
LTP_DEADLINE_S = 0.2
"""Deadline of LTP's early close, seconds; the paper's rule is not published."""
OPTIREDUCE_T_B_S = 0.37
"""OptiReduce's t_B of GPT-2 in its run scripts, seconds; it measures it, as the 95th percentile of 20 rounds over TCP."""
OPTIREDUCE_LEG = 0.5
"""Share of a leg's chunks above which OptiReduce's loss monitor skips the update; its threshold is not published."""
SERVER = "ps(whole)"
"""One server that trains too, reduces, then broadcasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published mechanism, or ``default``."""

    name: str
    """Its name."""
    policy: Policy
    """What a round may lose; where ``controller`` is given, in a critical phase."""
    controller: Callable[[], BudgetController] | None = None
    """Makes the controller that moves the budgets with the training phase, a new one for each model; None: they are fixed."""
    tolerant: Policy | None = None
    """The policy of a tolerant phase, where ``controller`` is given."""
    transport: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``TransportConfig`` that it sets, on all ranks."""
    source: str
    """Paper, and section or table."""
    differences: tuple[str, ...] = ()
    """Where it differs from the paper, and why."""

    def config(self, **overrides: Any) -> TransportConfig:
        """A transport configuration as this preset wants it, over the environment's; ``overrides`` win."""
        return TransportConfig.from_env(**{**self.transport, **overrides})


def preset(name: str, **settings: Any) -> Preset:
    """The preset of that name: ``exact``, ``mlt``, ``dblp``, ``ltp``, ``optireduce`` or ``default``.

    ``settings``: ``low`` (P_low of a leg, for ``mlt`` and ``dblp``), ``step`` and ``eta`` (``dblp``), ``share`` and
    ``deadline_s`` (``ltp``), ``t_b_s`` and ``leg`` (``optireduce``), ``leg`` (``default``). Raises ConfigError for another name
    or setting, and for values that make no policy.
    """
    make = _MAKERS.get(name) if isinstance(name, str) else None
    if make is None:
        raise ConfigError(
            f"preset {name!r}: there is none of that name; use one of {', '.join(_MAKERS)}{did_you_mean(str(name), _MAKERS)}"
        )
    known = inspect.signature(make).parameters
    for setting in settings:
        if setting not in known:
            raise ConfigError(
                f"preset {name!r} has no setting {setting!r}; it has: {', '.join(known) or 'none'}"
            )
    return make(**settings)


def presets() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_MAKERS)


def end_to_end(leg: float) -> float:
    """What two legs that each may miss ``leg`` of their chunks may miss together."""
    return 1.0 - (1.0 - leg) ** 2


def _check_leg(setting: str, share: float) -> None:
    """Raise ConfigError unless a leg can be bounded by it."""
    if not isinstance(share, Real) or not 0.0 <= share < 1.0:
        raise ConfigError(f"{setting}={share!r}: the share of a leg's chunks that may miss is in [0, 1)")


def _exact() -> Preset:
    return Preset(
        name="exact",
        policy=Policy(),
        source="loses nothing, as all-reduce does elsewhere (docs/design.md, C1)",
    )


def _eager_star(leg: float) -> Policy:
    """A server, and receivers that stop at once when they miss no more than ``leg``."""
    return Policy(
        budget=end_to_end(leg),
        gather_budget=leg,
        stop=Stop.EAGER,
        consistency=Consistency.RELAXED,
        algorithm=SERVER,
    )


_NO_COPIES = {"copies": 1}
"""In the papers a chunk is sent again once, when the one before is known to be lost."""
_PROBED = {**_NO_COPIES, "repair": "passes"}
"""MLT's and DBLP's repair: a probe behind all that has left, the receiver's bitmap, all that is missing, and the next probe."""
_STAR_DIFFERENCES = (
    "the server trains too, unless algorithm='ps(serve_only,whole)' is named: no rank is left idle",
    "the receiver's bitmap goes out with every feedback, not only in answer to a probe; the sender repairs behind the probe's",
    "control datagrams are UDP like the data and are repeated; the papers have a TCP connection for them",
    "replicas drift, since both legs fill zeros of their own; here the drift is measured and removed every resync_rounds rounds",
    "congestion control (delay), where DBLP has none",
)


def _mlt(low: float = DBLP_LOW) -> Preset:
    _check_leg("low", low)
    return Preset(
        name="mlt",
        policy=_eager_star(low),
        transport=_PROBED,
        source="MLT (NSDI'24), bounded loss without the switches' part, as DBLP's baseline (arXiv 2605.01989)",
        differences=(
            "one share for all tensors and for push and pull: DBLP's P_low; MLT profiles 0.7 to 3.3 % by model, or takes 10 % "
            "with more rounds",
            "no tags: MLT's queueing and dropping by layer and magnitude is Tags.BOTH, which any policy may add",
            "missing parameters keep their last value in MLT; in an all-reduce of gradients there are none",
            *_STAR_DIFFERENCES,
        ),
    )


def _dblp(low: float = DBLP_LOW, step: float = DBLP_STEP, eta: float = ETA) -> Preset:
    _check_leg("low", low)
    if not isinstance(step, Real) or step < 0.0:
        raise ConfigError(f"step={step!r}: P_high lies above P_low; a step is 0 or more")
    high = low + step
    _check_leg("low + step", high)
    check_eta(eta)

    def controller() -> BudgetController:
        budgets = Budgets(low=end_to_end(low), high=end_to_end(high), gather_low=low, gather_high=high)
        return BudgetController(NormChange(eta), budgets, interval=Interval(epochs=1))

    return Preset(
        name="dblp",
        policy=_eager_star(low),
        tolerant=_eager_star(high),
        transport=_PROBED,
        controller=controller,
        source="DBLP (arXiv 2605.01989), algorithm and table I: P_low 0.8 % (ResNet50: 2.4 %), P_high 40 points more, eta 0.5",
        differences=(
            "the first iteration of an epoch is measured and the decision holds from the next one on; the paper decides at the "
            "epoch's beginning",
            *_STAR_DIFFERENCES,
        ),
    )


def _ltp(share: float = LTP_SHARE, deadline_s: float = LTP_DEADLINE_S) -> Preset:
    _check_leg("share", share)
    return Preset(
        name="ltp",
        policy=Policy(
            budget=share,
            stop=Stop.DEADLINE,
            stop_after_s=deadline_s,
            consistency=Consistency.EXACT,
            algorithm=SERVER,
        ),
        transport={"congestion": "bbr", **_NO_COPIES},
        source="LTP (arXiv 2305.04279, IWQoS 2023): early close by two thresholds, reliable broadcast, BBR",
        differences=(
            "share and deadline of early close are fixed settings; the paper adapts them to the network by a rule that is not "
            "published",
            "a push below the share is repaired after the deadline too, since the bound is a guarantee here",
            "critical packets are the control datagrams, which always arrive; the paper does not publish its header",
            "bubbles need no padding: a chunk is a whole number of elements and has its place",
            "the server trains too, unless algorithm='ps(serve_only,whole)' is named",
        ),
    )


def _optireduce(t_b_s: float = OPTIREDUCE_T_B_S, leg: float = OPTIREDUCE_LEG) -> Preset:
    _check_leg("leg", leg)
    return Preset(
        name="optireduce",
        policy=Policy(
            budget=end_to_end(leg),
            gather_budget=leg,
            stop=Stop.DEADLINE,
            stop_after_s=t_b_s,
            short=Short.SKIP,
            consistency=Consistency.RELAXED,
            hadamard=True,
            algorithm="direct",
        ),
        transport=_NO_COPIES,
        source="OptiReduce (arXiv 2310.06993, NSDI'25): transpose all-reduce, unreliable bounded transport, Hadamard",
        differences=(
            "t_B is a setting, for each leg; the paper takes the 95th percentile of 20 rounds over TCP",
            "the early timeout t_C is the stall rule: twice the spread of one-way delays after the last chunk that helped",
            "the loss monitor's threshold is a setting; at t_B all ranks skip a step that any of them found above it",
            "what is lost above that threshold is repaired until t_B, where OptiReduce repairs nothing",
            "the transform is in blocks and orthonormal (torch/hadamard.py)",
            "dynamic incast goes by repeated chunks and the time of a round (algorithms/incast.py)",
            "replicas drift; the drift is measured and removed every resync_rounds rounds",
        ),
    )


def _default(leg: float = DEFAULT_LEG) -> Preset:
    _check_leg("leg", leg)
    return Preset(
        name="default",
        policy=Policy(
            budget=end_to_end(leg),
            gather_budget=leg,
            stop=Stop.STALL,
            consistency=Consistency.AGREED,
            carry=Carry(),
            tags=Tags.BOTH,
        ),
        source="dblp's own: identical replicas, what is lost is carried, nothing is thrown away that is on its way",
    )


_MAKERS: Mapping[str, Callable[..., Preset]] = MappingProxyType(
    {
        "exact": _exact,
        "mlt": _mlt,
        "dblp": _dblp,
        "ltp": _ltp,
        "optireduce": _optireduce,
        "default": _default,
    }
)
