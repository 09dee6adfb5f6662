"""A laboratory network: built on entry, impaired and counted meanwhile, removed on exit, also after Ctrl-C or SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from dblp.errors import ClosedError
from dblp.sim.lab import leftovers, means, namespaces, preflight
from dblp.sim.lab.counters import Counters
from dblp.sim.lab.hosts import Host
from dblp.sim.lab.impairer import Impairer
from dblp.sim.lab.impairments import Applied, Conditions, Schedule
from dblp.sim.lab.means import Means
from dblp.sim.lab.plan import cross_names, host_names, make_plan
from dblp.sim.lab.tools import LabError
from dblp.sim.lab.topology import Topology
from dblp.sim.lab.wiring import Wiring, available_congestion

_END_S = 2.0
"""How long a command that was started here may take to end after SIGTERM."""


class LabNetwork:
    """Use as a context manager. ``means``: how to impair; by default what the kernel offers.

    Raises PrivilegeError without root, LabError where the host lacks something, ConfigError for an unusable prefix.
    """

    def __init__(
        self, topology: Topology, prefix: str = namespaces.PREFIX, means: Means | None = None
    ) -> None:
        self.topology = topology
        self.hosts: tuple[Host, ...] = ()
        self.cross: tuple[tuple[Host, Host], ...] = ()
        """Pairs of hosts for cross traffic."""
        self._prefix = prefix
        self._plan = make_plan(topology)
        stem = namespaces.next_stem(prefix)
        self._names = {node.name: f"{stem}-{node.name}" for node in self._plan.nodes}
        self._wiring = Wiring(self._plan, self._names)
        self._means = means
        self._impairer: Impairer | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self._old_handler: Any = None
        self._lock = threading.Lock()

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links, for conditions."""
        return self._plan.links

    @property
    def means(self) -> Means:
        """How this network is impaired."""
        return self._running().means

    def __enter__(self) -> LabNetwork:
        preflight.require()
        leftovers.remove_leftovers(self._prefix)
        self._catch_sigterm()
        atexit.register(self.close)
        try:
            self._wiring.build()
            chosen = self._means if self._means is not None else means.detect()
            self._impairer = Impairer(self._plan, self._names, chosen)
        except BaseException:
            self.close()
            raise
        found = {name: self._host(index, name) for index, name in enumerate(host_names(self.topology))}
        self.hosts = tuple(found.values())[: self.topology.hosts]
        self.cross = tuple((found[x], found[y]) for x, y in cross_names(self.topology))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the network and remove it; a second call does nothing. Ctrl-C waits until that is done."""
        with _uninterrupted():
            self._impairer = None
            for child in self._children:
                _end(child)
            self._children.clear()
            for name in self._names.values():
                namespaces.remove(name)
            atexit.unregister(self.close)
        self._release_sigterm()

    def popen(self, host: Host, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; it keeps the process id that Popen tells, and ends with the network at the latest."""
        self._running()
        child = host.popen(argv, **options)
        self._children.append(child)
        return child

    def set_congestion(self, name: str) -> None:
        """TCP's congestion control for connections that hosts open or accept from now on; raises LabError if it is missing."""
        self._running()
        known = available_congestion(self.hosts[0].namespace)
        if name not in known:
            raise LabError(
                f"TCP congestion control {name!r}: this kernel offers {', '.join(known)}. Remedy: modprobe tcp_{name}"
            )
        self._wiring.set_congestion(name)
        for host in (*self.hosts, *(end for pair in self.cross for end in pair)):
            shown = namespaces.run_in(host.namespace, ["ip", "route", "show"])
            if f"congctl {name}" not in shown:
                raise LabError(f"{host.name}: the route did not take congctl {name}: {shown.strip()}")
            namespaces.run_in(host.namespace, ["ip", "tcp_metrics", "flush", "all"])

    def apply(self, conditions: Conditions) -> None:
        """From now on these conditions hold, in place of earlier ones; returns when they do.

        Raises ConfigError for a link that isn't there, LabError for what this kernel cannot do.
        """
        with self._lock:
            self._running().apply(conditions)

    def counters(self) -> Counters:
        """The kernel's counters since the network was built; subtract to get those of a time."""
        with self._lock:
            return self._running().counters()

    def model_counters(self) -> Counters:
        """The same for what models drop; a burst can spare the time. Drops of full queues may be lacking."""
        with self._lock:
            return self._running().counters(full_queues=False)

    @contextlib.contextmanager
    def playing(self, schedule: Schedule) -> Iterator[list[Applied]]:
        """Play a schedule in a thread while the block runs; yields the record of what held when, which grows.

        Raises, at the end, what went wrong in the thread.
        """
        record: list[Applied] = []
        stop, faults = threading.Event(), []

        def play() -> None:
            try:
                schedule.run(self, stop, record, count=self.model_counters, gaps=schedule.base.loss > 0)
            except Exception as fault:  # told by the thread that started it
                faults.append(fault)

        thread = threading.Thread(target=play, name="dblp-lab-schedule", daemon=True)
        thread.start()
        try:
            yield record
        finally:
            stop.set()
            thread.join()
        if faults:
            raise faults[0]

    def _host(self, index: int, name: str) -> Host:
        end = self._plan.host_end(name)
        return Host(index, name, self._names[name], end.ip, end.device)

    def _running(self) -> Impairer:
        if self._impairer is None:
            raise ClosedError(
                "the laboratory network is not built, or removed already: use it within its 'with' block"
            )
        return self._impairer

    def _catch_sigterm(self) -> None:
        """SIGTERM unwinds as SystemExit, unless the program has a handler of its own."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit)
            self._old_handler = signal.SIG_DFL

    def _release_sigterm(self) -> None:
        if self._old_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(child: subprocess.Popen[Any]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come meanwhile take effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)
