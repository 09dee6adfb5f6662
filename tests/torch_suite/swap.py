"""Puts one backend where torch's suites ask for another by name.

torch's tests choose what they run by comparing BACKEND with names that they know (gloo, nccl, mpi). So they are
told "gloo", and each group that they make by that name, or by none, is made of ``backend``.
"""

# mypy: disable-error-code="attr-defined"

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

ASKED = "gloo"
"""The name by which torch's suites ask."""


def preload(backend: str) -> None:
    """Import what a group of ``backend`` needs, in the process that is forked for every rank."""
    if backend == "dblp":
        importlib.import_module("dblp.collectives.torch.creation")


def swap(backend: str) -> None:
    """Have every group in this process that is asked for as gloo made of ``backend``."""
    if backend == ASKED:
        return
    for name in ("init_process_group", "new_group"):
        put = _swapped(getattr(distributed_c10d, name), backend)
        setattr(distributed_c10d, name, put)
        setattr(dist, name, put)
    dist.monitored_barrier = _without_name_check(dist.monitored_barrier)


def _swapped(make: Callable[..., Any], backend: str) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == ASKED:
            kwargs["backend"] = backend
        if args and args[0] == ASKED:
            args = (backend, *args[1:])
        return make(*args, **kwargs)

    return made


def _without_name_check(monitored_barrier: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``monitored_barrier`` refuses every backend that is not named gloo, whether it has the method or not."""

    @wraps(monitored_barrier)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(distributed_c10d, "get_backend", lambda group: dist.Backend.GLOO):
            return monitored_barrier(*args, **kwargs)

    return checked
