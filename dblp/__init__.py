"""dblp: a loss-tolerant gradient all-reduce over UDP for PyTorch.

Everything here loads on first use (PEP 562): ``import dblp`` itself imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dblp.collectives.api import (
        Handle,
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        destroy_process_group,
        flight_recorder,
        gather,
        get_rank,
        get_world_size,
        init_process_group,
        is_initialized,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from dblp.collectives.budget import BudgetController, Budgets, EnergyCap, Interval
    from dblp.collectives.group import Group
    from dblp.collectives.joint import EnergyCaps, JointController
    from dblp.collectives.phases import (
        Hold,
        LearningRateChange,
        Manual,
        Metric,
        NormChange,
        Phase,
        Schedule,
    )
    from dblp.collectives.presets import Preset, preset, presets
    from dblp.collectives.recorder import FlightRecorder
    from dblp.collectives.report import Report
    from dblp.collectives.torch.checkpoint import CheckpointState, merge_states
    from dblp.collectives.torch.hook import Attachment, attach
    from dblp.errors import (
        ClosedError,
        ConfigError,
        DblpError,
        DeadlineError,
        HandshakeError,
        LocalError,
        MismatchError,
        PeerError,
        RemoteError,
        UnsupportedError,
        VersionError,
    )
    from dblp.transport.config import TransportConfig
    from dblp.transport.policy import (
        Bounded,
        Carry,
        CarryBound,
        Consistency,
        Exact,
        Fill,
        Policy,
        Short,
        Stop,
        Tags,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    # torch.distributed-like functions, on tensors and numpy arrays
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "Handle",
    "flight_recorder",
    "FlightRecorder",
    # async collectives on numpy arrays
    "Group",
    "Report",
    # DDP and FSDP2
    "attach",
    "Attachment",
    "CheckpointState",
    "merge_states",
    # budgets that follow the training phase
    "BudgetController",
    "Budgets",
    "Interval",
    "EnergyCap",
    "JointController",
    "EnergyCaps",
    "Phase",
    "NormChange",
    "LearningRateChange",
    "Metric",
    "Schedule",
    "Manual",
    "Hold",
    # policies and configuration
    "Policy",
    "Bounded",
    "Exact",
    "Stop",
    "Short",
    "Fill",
    "Consistency",
    "Carry",
    "CarryBound",
    "Tags",
    "Preset",
    "preset",
    "presets",
    "TransportConfig",
    # errors
    "DblpError",
    "LocalError",
    "ConfigError",
    "UnsupportedError",
    "ClosedError",
    "RemoteError",
    "MismatchError",
    "VersionError",
    "HandshakeError",
    "PeerError",
    "DeadlineError",
]

_MODULES = {
    "dblp.collectives.api": (
        "Handle all_gather all_reduce all_to_all barrier broadcast destroy_process_group flight_recorder gather get_rank "
        "get_world_size init_process_group is_initialized recv reduce reduce_scatter scatter send"
    ),
    "dblp.collectives.budget": "BudgetController Budgets EnergyCap Interval",
    "dblp.collectives.group": "Group",
    "dblp.collectives.joint": "EnergyCaps JointController",
    "dblp.collectives.phases": "Hold LearningRateChange Manual Metric NormChange Phase Schedule",
    "dblp.collectives.presets": "Preset preset presets",
    "dblp.collectives.recorder": "FlightRecorder",
    "dblp.collectives.report": "Report",
    "dblp.collectives.torch.checkpoint": "CheckpointState merge_states",
    "dblp.collectives.torch.hook": "Attachment attach",
    "dblp.errors": (
        "ClosedError ConfigError DblpError DeadlineError HandshakeError LocalError MismatchError PeerError "
        "RemoteError UnsupportedError VersionError"
    ),
    "dblp.transport.config": "TransportConfig",
    "dblp.transport.policy": "Bounded Carry CarryBound Consistency Exact Fill Policy Short Stop Tags",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dblp' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        return _NeedsTorch(name)  # so that ``from dblp import *`` and ``help(dblp)`` work without
    globals()[name] = value
    return value


class _NeedsTorch:
    """Stands for what needs torch where that is not installed: whoever uses it is told."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever only looks, as inspect does
            raise AttributeError(name)
        raise self._error()

    def __repr__(self) -> str:
        return f"<dblp.{self.__name__}, which needs torch>"

    def _error(self) -> Exception:
        from dblp.errors import LocalError
        from dblp.installed import pip_line

        return LocalError(f"dblp.{self.__name__} needs torch, which is not installed: {pip_line('torch')}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _register() -> None:
    """Tell torch of the backend where torch is there first: its entry point does so too, but not for a checkout on PYTHONPATH or
    under TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    if sys.modules.get("torch") is not None:  # None: somebody has forbidden it
        importlib.import_module("dblp.collectives.torch.autoload").autoload()


_register()
