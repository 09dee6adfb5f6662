"""Sweeps on a Ray cluster: each case is a task, on whichever machine has a core free.

A case depends on its seed alone, so where it runs changes nothing; a machine that has another version of the simulator is found
out by its source's digest and refused. A task whose machine is lost runs again elsewhere.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dblp.errors import ConfigError, LocalError
from dblp.installed import pip_line
from dblp.sim.fabric.experiment import Case, code_digest

if TYPE_CHECKING:
    from dblp.sim.fabric.sweep import CaseResult

LOCAL, RUNNING = "local", "auto"
"""Addresses: a cluster of this machine alone, for this sweep; the one that runs here already (``ray start``)."""
CLIENT = "ray://"
ANSWER_S = 5.0
"""Time in which a cluster's head must take a connection: ray itself tries for minutes."""
RETRIES = 3
"""Times that a case runs again after its machine or process was lost."""
STORE_BYTES = 1 << 27
"""Ray's shared memory of a local cluster: results are small."""


def check_address(address: str) -> None:
    """Raise ConfigError for what is no address, LocalError for a head that does not answer."""
    if address in (LOCAL, RUNNING):
        return
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"--ray {address!r}: {LOCAL} (start one here), {RUNNING} (one that runs here), HOST:PORT or {CLIENT}HOST:PORT"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise LocalError(
            f"--ray {address}: no Ray cluster answers there ({error}); start its head with: ray start --head"
        ) from None


def run_checked(case: Case, pictured: bool, digest: str) -> CaseResult:
    """Run one case, on a machine of the cluster; ``digest``: that of the code that asks."""
    from dblp.sim.fabric.sweep import run_case

    if code_digest() != digest:
        raise LocalError(
            f"{platform.node()}: its dblp is another version than the one that runs the sweep: install the same everywhere"
        )
    return run_case(case, pictured)


def run_on_ray(
    cases: Sequence[Case], address: str, pictured: Callable[[Case], bool] = lambda case: False
) -> Iterator[CaseResult]:
    """The results as they come. ``address``: see ``check_address``. Raises what a case raises, ConfigError, and LocalError
    without Ray, without a cluster, or if cases are lost for good."""
    if not cases:
        return
    ray = _connected(address)
    left: list[Any] = []
    try:
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(run_checked)
        left = [remote.remote(case, pictured(case), code_digest()) for case in cases]
        while left:
            done, left = ray.wait(left, num_returns=1)
            yield _result(ray, done[0])
    finally:
        for task in left:
            ray.cancel(task, force=True)
        ray.shutdown()


def _connected(address: str) -> Any:
    """The package, with a cluster."""
    check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise LocalError(f"--ray needs Ray: {pip_line('ray', 'sim')}") from None
    settings: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            **(settings if address == LOCAL else {}),
        )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise LocalError(
            f"--ray {address}: no Ray cluster there: {str(error).splitlines()[0]}; start one with: ray start --head"
        ) from None
    return ray


def _result(ray: Any, task: Any) -> CaseResult:
    """What a task came to; its error is the case's own."""
    try:
        result: CaseResult = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from None
    except ray.exceptions.RayError as error:
        raise LocalError(
            f"a case was lost {1 + RETRIES} times ({type(error).__name__}), perhaps for want of memory: see ray's logs, "
            "or run it with --processes 1"
        ) from None
    return result
