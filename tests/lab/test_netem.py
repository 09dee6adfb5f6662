"""tc's netem for real: natively where the kernel has it, else in the guest that the command DBLP_NETEM_RUNNER boots.

The runner takes one argument, a shell text, runs it as root under a kernel with netem that sees this machine's files, and
ends with its exit code. The last test of this file runs the others there, in one guest.
"""

import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dblp.sim.lab import means, namespaces
from dblp.sim.lab.impairments import parse_conditions, parse_schedule
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.preflight import preflight
from dblp.sim.lab.topology import Topology, load_topology
from dblp.transport import libc
from dblp.transport.impair_model import Impairer
from dblp.transport.impair_spec import parse_impair
from dblp.transport.udp_send import DSCP
from tests.lab.datagrams import PORT, mean_run, missing, needs_lab, send, why_not

RUNNER = os.environ.get("DBLP_NETEM_RUNNER", "")
NATIVE = not why_not() and means.detect().netem
PREFIX = "dblpnetem"
_SO_TIMESTAMPNS = 35
_ECT0 = 2
"""IP TOS: capable of ECN."""
GUEST_SECONDS = 550
"""A guest boots in 3 to 32 seconds, and a system call costs 10 to 40 microseconds there."""

pytestmark = [pytest.mark.lab, pytest.mark.netem, needs_lab]
in_netem = pytest.mark.skipif(
    not NATIVE,
    reason="this kernel has no netem; test_in_a_guest runs this where DBLP_NETEM_RUNNER names a runner",
)


@pytest.fixture(scope="module")
def star():
    with LabNetwork(Topology(kind="star", hosts=3), PREFIX) as net:
        yield net


@pytest.fixture
def net(star):
    yield star
    star.apply(parse_conditions(""))


@in_netem
def test_gilbert_elliott_here_in_netem_and_in_closed_form():
    """Loss good*r/(p+r) + bad*p/(p+r) (Gilbert 1960, Elliott 1963, as in Hasslinger and Hohlfeld 2008). With good = 0, a run of
    losses goes on with probability (1-r)*bad, so it lasts 1/(1-(1-r)*bad) on average; that is 1/r for bad = 1."""
    for p, r, bad in ((0.01, 0.3, 1.0), (0.02, 0.2, 0.8)):
        text = f"ge(p={p},r={r},bad={bad})"
        loss, run = bad * p / (p + r), 1 / (1 - (1 - r) * bad)
        with LabNetwork(Topology(kind="star", hosts=2), PREFIX) as net:
            assert net.means.loss == "netem"
            net.apply(parse_conditions(text))
            before, count = net.counters(), 40_000
            theirs = missing(net.hosts[0], net.hosts[1], count, quiet_s=2.0)
            spent = net.counters() - before
        ours = np.ones(400_000, np.bool_)
        ours[Impairer(parse_impair(f"{text},seed(5)")).apply(np.full(len(ours), 1000), 0.0).index] = False
        assert spent.dropped_by_model == theirs.sum(), "tc's counters and what the receiver misses"
        for lost in (theirs, ours):
            runs = len(lost) * p * r / (p + r)
            # Five standard errors: of a sum of geometric runs, and of their mean.
            print(f"{text}: loss {lost.mean():.4f} ({loss:.4f}), mean run {mean_run(lost):.3f} ({run:.3f})")  # noqa: T201
            assert lost.mean() == pytest.approx(loss, rel=5 * (2 / runs) ** 0.5)
            # A geometric length of mean m has a deviation of (m*(m-1))**0.5.
            assert mean_run(lost) == pytest.approx(run, rel=5 * ((run - 1) / run / runs) ** 0.5)


@in_netem
def test_uniform_loss_is_counted_as_receivers_miss_it(net):
    net.apply(parse_conditions("loss(10%)"))
    before, count = net.counters(), 6000
    lost = missing(net.hosts[0], net.hosts[1], count, quiet_s=2.0)
    spent = net.counters() - before
    assert spent.dropped_by_model == lost.sum()
    assert spent.forwarded == count - lost.sum()
    assert abs(lost.sum() - 0.1 * count) <= 5 * (count * 0.09) ** 0.5


@in_netem
def test_a_grey_link_loses_both_ways(net):
    net.apply(parse_conditions("loss(20%),links(h2)"))
    before, count = net.counters(), 1500
    lost = [
        missing(net.hosts[a], net.hosts[b], count, quiet_s=2.0).sum() for a, b in ((0, 2), (2, 0), (0, 1))
    ]
    assert lost[2] == 0
    for hits in lost[:2]:
        assert abs(hits - 0.2 * count) <= 5 * (count * 0.16) ** 0.5
    spent = net.counters() - before
    assert spent.points["h2_down"].dropped_by_model == lost[0]
    assert spent.points["h2_up"].dropped_by_model == lost[1]


@in_netem
def test_delay_is_late_and_loses_nothing(net):
    net.apply(parse_conditions("delay(20ms)"))
    near, far = (namespaces.open_socket(host.namespace) for host in net.hosts[:2])
    with near, far:
        near.bind((net.hosts[0].address, PORT))
        far.bind((net.hosts[1].address, PORT))
        near.connect(far.getsockname())
        near.settimeout(20)
        far.settimeout(20)
        trips = []
        for _ in range(20):
            start = time.monotonic()
            near.send(b"x")
            far.sendto(*far.recvfrom(10))
            near.recv(10)
            trips.append(time.monotonic() - start)
    assert min(trips) >= 0.0399, "twenty milliseconds each way, by the kernel's clock"
    assert not missing(net.hosts[0], net.hosts[1], 2000, quiet_s=2.0).any(), (
        "netem's limit holds what is late"
    )


@in_netem
def test_duplicates_reordering_and_damage(net):
    count = 2000
    net.apply(parse_conditions("duplicate(20%)"))
    came = send(net.hosts[0], net.hosts[1], count, quiet_s=2.0)
    assert len(set(came.tolist())) == count
    assert abs(len(came) - 1.2 * count) <= 5 * (count * 0.16) ** 0.5
    net.apply(parse_conditions("reorder(20%,by=10ms)"))
    came = send(net.hosts[0], net.hosts[1], count, quiet_s=2.0)
    assert sorted(came.tolist()) == list(range(count))
    assert (np.diff(came) < 0).any()
    net.apply(parse_conditions("corrupt(20%)"))
    lost = missing(net.hosts[0], net.hosts[1], count, quiet_s=2.0)
    assert 0 < lost.sum() <= 0.2 * count + 5 * (count * 0.16) ** 0.5, "checksums drop what is damaged"
    net.apply(parse_conditions(""))
    assert np.array_equal(send(net.hosts[0], net.hosts[1], 500, quiet_s=2.0), np.arange(500))


@in_netem
def test_what_bursts_drop_is_counted_while_they_hold(net):
    """Packets that were late on their way when a burst began, and leave within it, met no loss."""
    schedule = parse_schedule("loss(2%),delay(700ms),bursts(loss=0.5,length=2s,every=4s)")
    with net.playing(schedule) as record:
        deadline = time.monotonic() + 60
        while _least(record) < 2000 and time.monotonic() < deadline:
            missing(net.hosts[0], net.hosts[1], 15_000, quiet_s=1.5)
    inside = [applied.inside for applied in record if applied.inside is not None]
    before = [applied.before for applied in record if applied.before is not None]
    for counters, share in ((inside, 0.5), (before, 0.02)):
        offered = sum(part.offered for part in counters)
        dropped = sum(part.dropped_by_model for part in counters)
        assert offered > 500
        assert abs(dropped - share * offered) <= 5 * (offered * share * (1 - share)) ** 0.5


def _least(record):
    """Packets that were counted within bursts, or between them if these are fewer."""
    inside = sum(applied.inside.offered for applied in record if applied.inside)
    return min(inside, sum(applied.before.offered for applied in record if applied.before))


@in_netem
def test_a_slot_lets_packets_out_together(net):
    """One packet each 2 ms goes in; all come out, at about as many instants as there were slots, and evenly again afterwards."""
    instants = {}
    for text in ("slot(50ms)", ""):
        net.apply(parse_conditions(text))
        instants[text] = _instants(net, count=200, every_s=0.002)
    assert [sum(sizes) for sizes in instants.values()] == [200, 200]
    took_s = 200 * 0.002
    assert took_s / 0.05 / 2 <= len(instants["slot(50ms)"]) <= 1.5 * took_s / 0.05 + 10
    assert max(instants["slot(50ms)"]) >= 10 and len(instants[""]) > 2 * len(instants["slot(50ms)"])


def _instants(net, count, every_s):
    """How many packets came at each instant: what came within a millisecond, by the kernel's stamps."""
    stamps = []
    with (
        namespaces.open_socket(net.hosts[1].namespace) as inbox,
        namespaces.open_socket(net.hosts[0].namespace) as out,
    ):
        inbox.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        inbox.bind((net.hosts[1].address, PORT))
        inbox.settimeout(2)
        for _ in range(count):
            out.sendto(b"x", (net.hosts[1].address, PORT))
            time.sleep(every_s)
        for _ in range(count):
            _, ancillary, _, _ = inbox.recvmsg(10, 64)
            seconds, nanoseconds = struct.unpack("=qq", ancillary[0][2])
            stamps.append(seconds + 1e-9 * nanoseconds)
    starts = np.flatnonzero(np.diff(stamps, prepend=-1.0) > 0.001)
    return np.diff(starts, append=count).tolist()


@in_netem
def test_drops_of_a_queue_below_netem_are_the_queues(net):
    net.apply(parse_conditions("loss(10%),delay(5ms),rate(1mbit,queue=8KB),links(h1,way=down)"))
    before, count = net.counters(), 600
    lost = missing(net.hosts[0], net.hosts[1], count, quiet_s=3.0)
    spent = (net.counters() - before).points["h1_down"]
    assert spent.dropped_by_queue > 0
    assert spent.dropped_by_model + spent.dropped_by_queue == lost.sum()
    # The model saw all; the queue saw what the model left.
    assert abs(spent.dropped_by_model - 0.1 * count) <= 5 * (count * 0.09) ** 0.5


@in_netem
def test_a_topology_has_its_delay_and_the_preflight_names_netem():
    topology = load_topology("two-sites", hosts=2, core_delay="10ms", core_rate=0, rate=0)
    with LabNetwork(topology, PREFIX) as net:
        start = time.monotonic()
        assert len(send(net.hosts[0], net.hosts[1], 1, quiet_s=1.0)) == 1
        assert time.monotonic() - start >= 0.01
    findings = {finding.what: finding for finding in preflight()}
    assert findings["loss"].found.startswith("tc netem")
    assert findings["delay"].ok
    assert findings["single datagrams"].ok, findings["single datagrams"]


@in_netem
def test_a_critical_class_passes_a_full_queue_by_its_dscp():
    """prio: what bears class 0's DSCP overtakes a queue that class 3 overfills."""
    topology = Topology(kind="star", hosts=2, rate_bps=1e6, queue_bytes=16384, discipline="prio")
    with LabNetwork(topology, PREFIX) as net:
        # Ten of class 0: its own band holds 15 of them, so that none is lost for itself however quickly they are sent.
        heard = _flood(net, {0: DSCP[0] << 2, 3: DSCP[3] << 2}, every={0: 40, 3: 1})
        dropped = net.counters().dropped_by_queue
    assert heard[0].lost == 0
    assert heard[3].lost > 0
    assert dropped == heard[3].lost


@in_netem
def test_red_marks_before_it_drops():
    """red: of two equal streams into a full queue, the one that is capable of ECN is marked."""
    topology = Topology(kind="star", hosts=2, rate_bps=1e6, queue_bytes=32768, discipline="red")
    with LabNetwork(topology, PREFIX) as net:
        heard = _flood(net, {0: 0, 3: _ECT0}, every={0: 1, 3: 1})
    assert heard[3].marked > 0
    assert heard[0].marked == 0
    assert heard[0].lost > 0


@dataclass
class Heard:
    """What came of a stream."""

    sent: int = 0
    came: int = 0
    marked: int = 0
    """With the mark "congestion experienced"."""

    @property
    def lost(self) -> int:
        return self.sent - self.came


def _flood(net, streams, every):
    """Streams with an IP TOS each into a host's link, past its rate; the sender's own card does not hold them back."""
    net.apply(parse_conditions("rate(100mbit),links(h0,way=up)"))
    heard = {stream: Heard() for stream in streams}
    source, target = net.hosts
    outs = {stream: namespaces.open_socket(source.namespace) for stream in streams}
    with namespaces.open_socket(target.namespace) as inbox:
        inbox.setsockopt(socket.SOL_SOCKET, libc.SO_RCVBUFFORCE, 2**24)
        inbox.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        inbox.bind((target.address, PORT))
        inbox.settimeout(3)
        for stream, out in outs.items():
            out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, streams[stream])
        for number in range(400):
            for stream, out in outs.items():
                if number % every[stream] == 0:
                    out.sendto(bytes([stream]) * 1000, (target.address, PORT))
                    heard[stream].sent += 1
        for out in outs.values():
            out.close()
        while True:
            try:
                data, ancillary, _, _ = inbox.recvmsg(2000, 64)
            except TimeoutError:
                return heard
            heard[data[0]].came += 1
            heard[data[0]].marked += any(tos[0] & 3 == 3 for _, _, tos in ancillary)


@in_netem
@pytest.mark.processes
def test_bounded_rounds_keep_their_bound():
    """C2 and C3 under bursts of loss and a delay made by the kernel: no round misses more than its budget, all ranks hold the
    same bits, and something was lost on the way, by netem's own count."""
    rounds = 8
    with LabNetwork(Topology(kind="star", hosts=2), PREFIX) as net:
        net.apply(parse_conditions("ge(p=0.01,r=0.2,bad=0.9),delay(2ms)"))
        before = net.counters()
        ranks = []
        for host in net.hosts:
            place = {
                **os.environ,
                "RANK": str(host.index),
                "WORLD_SIZE": "2",
                "MASTER_PORT": "29400",
                "MASTER_ADDR": net.hosts[0].address,
                "DBLP_CONNECT_TIMEOUT_S": "120",
            }
            command = [sys.executable, "-m", "tests.lab.bounded_rounds", str(rounds)]
            ranks.append(net.popen(host, command, env=place, stdout=subprocess.PIPE, text=True))
        results = [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]
        spent = net.counters() - before
    assert spent.dropped_by_model > 0
    for result in results:
        assert len(result["missing"]) == rounds
        assert max(result["missing"]) <= 0.1
        assert result["digest"] == results[0]["digest"]
    holes = sum(result["holes"] for result in results)
    assert sum(result["resent"] for result in results) + holes > 0
    assert holes or not any(result["short"] for result in results), "a loss that no report tells"


@pytest.mark.skipif(NATIVE, reason="this kernel has netem: the tests above ran here")
@pytest.mark.skipif(not RUNNER, reason="DBLP_NETEM_RUNNER names no runner, and this kernel has no netem")
@pytest.mark.timeout(GUEST_SECONDS + 30)
def test_in_a_guest():
    """All the others of this file, in a kernel that has netem: each must pass, none may be skipped."""
    # The guest sees the files read-only: no cache, no data base of examples.
    without = [
        word for name in ("cacheprovider", "hypothesispytest", "xdist") for word in ("-p", f"no:{name}")
    ]
    inside = [sys.executable, "-m", "pytest", *without, "-v", "-o", "timeout=240"]
    text = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([*inside, 'tests/lab/test_netem.py'])}"
    place = {**os.environ, "PYTHONPATH": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"}
    place = {
        name: value for name, value in place.items() if not name.startswith(("PYTEST_", "DBLP_NETEM_RUNNER"))
    }
    done = subprocess.run(
        [*shlex.split(RUNNER), text],
        env=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUEST_SECONDS,
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    wanted = re.findall(r"^@in_netem\n(?:@.*\n)*def (\w+)", Path(__file__).read_text(), re.MULTILINE)
    passed = re.findall(r"::(\w+) PASSED", done.stdout)
    assert set(passed) == set(wanted), said
