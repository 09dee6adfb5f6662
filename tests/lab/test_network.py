"""Networks of namespaces through the real kernel. Root only."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dblp.errors import ClosedError, ConfigError
from dblp.scratch import started
from dblp.sim.lab import means, namespaces
from dblp.sim.lab.impairments import Schedule, parse_conditions, parse_schedule
from dblp.sim.lab.leftovers import find_leftovers, remove_leftovers
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.tools import LabError
from dblp.sim.lab.topology import KINDS, Topology, load_topology
from dblp.sim.lab.traffic import CrossTraffic, Traffic
from tests.lab.datagrams import PORT, mean_run, missing, needs_lab, needs_loss, send

pytestmark = [pytest.mark.lab, needs_lab]

PREFIX = "dblptest"
STAR_PREFIX = "dblpstar"
DELAYS = not means.detect().netem
"""Where the kernel cannot delay, topologies are built without."""


def ours(prefix=PREFIX):
    """Namespaces of this process (others may run tests beside)."""
    return [name for name in namespaces.names() if namespaces.owner_of(name, prefix) == os.getpid()]


def running(pid):
    """Whether a process runs; one that ended and whose parent did not ask for it yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def topology(name, **changes):
    if DELAYS and name == "two-sites":
        changes.setdefault("core_delay", 0)
    return load_topology(name, **changes)


@pytest.fixture(scope="module")
def star():
    with LabNetwork(Topology(kind="star", hosts=3), STAR_PREFIX) as net:
        yield net


@pytest.fixture
def net(star):
    yield star
    star.apply(parse_conditions(""))


def assert_binomial(hits, count, share):
    """Within five standard deviations."""
    assert abs(hits - count * share) <= 5 * (count * share * (1 - share)) ** 0.5 + 1e-9, (hits, count, share)


@pytest.mark.parametrize("name", KINDS)
def test_every_host_reaches_every_other(name):
    before = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    with LabNetwork(topology(name, cross=1), PREFIX) as net:
        hosts = [*net.hosts, *net.cross[0]]
        assert [host.name for host in hosts] == ["h0", "h1", "h2", "h3", "x0", "y0"]
        outs = [namespaces.open_socket(host.namespace) for host in hosts]
        ins = [namespaces.open_socket(host.namespace) for host in hosts]
        try:
            for host, inbox in zip(hosts, ins, strict=True):
                inbox.bind((host.address, PORT))
                inbox.settimeout(5)
            for host, out in zip(hosts, outs, strict=True):
                for other in hosts:
                    out.sendto(host.name.encode(), (other.address, PORT))
            for inbox in ins:
                heard = {inbox.recv(100).decode() for _ in hosts}
                assert heard == {host.name for host in hosts}
        finally:
            for sock in (*outs, *ins):
                sock.close()
        counters = net.counters()
        assert counters.forwarded == len(hosts) * (len(hosts) - 1)
        assert counters.offered == counters.forwarded
    after = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert after == before, "the host's own devices are as they were"
    assert not ours()


@needs_loss
def test_loss_is_what_was_asked_and_counters_say_what_receivers_miss(net):
    count = 20_000
    net.apply(parse_conditions("loss(5%)"))
    before = net.counters()
    lost = missing(net.hosts[0], net.hosts[1], count)
    spent = net.counters() - before
    assert_binomial(lost.sum(), count, 0.05)
    assert spent.dropped_by_model == lost.sum()
    assert spent.forwarded == count - lost.sum()
    assert spent.dropped_by_queue == 0
    assert spent.points["h1_down"].loss == pytest.approx(lost.mean())
    net.apply(parse_conditions(""))
    assert not missing(net.hosts[0], net.hosts[1], 1000).any()


@needs_loss
def test_gilbert_elliott_works_by_the_packet(net):
    p, r, bad = 0.01, 0.3, 0.9
    count = 60_000
    net.apply(parse_conditions(f"ge(p={p},r={r},bad={bad})"))
    before = net.counters()
    lost = missing(net.hosts[0], net.hosts[1], count)
    assert (net.counters() - before).dropped_by_model == lost.sum()
    # Five standard deviations of about p*count bad runs, each of 1/r packets on average.
    runs = count * p * r / (p + r)
    assert lost.mean() == pytest.approx(bad * p / (p + r), rel=5 * (2 / runs) ** 0.5)
    # A run of losses goes on with probability (1 - r) * bad.
    assert mean_run(lost) == pytest.approx(1 / (1 - (1 - r) * bad), rel=5 * 1.3 / runs**0.5)


@needs_loss
def test_a_grey_link_loses_both_ways_and_on_no_other_link(net):
    grey, left, right = net.hosts[2], net.hosts[0], net.hosts[1]
    net.apply(parse_conditions("loss(20%),links(h2)"))
    before = net.counters()
    count = 3000
    assert_binomial(missing(left, grey, count).sum(), count, 0.2)
    assert_binomial(missing(grey, left, count).sum(), count, 0.2)
    assert not missing(left, right, count).any()
    spent = net.counters() - before
    assert spent.link("h2").dropped_by_model == spent.dropped_by_model
    assert spent.points["h2_up"].dropped_by_model
    net.apply(parse_conditions("loss(20%),links(h2,way=up)"))
    assert not missing(left, grey, count).any()


@pytest.mark.skipif(not means.detect().tbf, reason="the kernel has no tbf")
def test_a_rate_holds_and_its_queue_drops_are_the_queues(net):
    rate, queue, count, size = 2e6, 16 * 1024, 1000, 200 + 42
    net.apply(parse_conditions("rate(2mbit,queue=16KB),links(h1,way=down)"))
    before, start = net.counters(), time.monotonic()
    came = send(net.hosts[0], net.hosts[1], count)
    elapsed = time.monotonic() - start
    spent = (net.counters() - before).points["h1_down"]
    assert len(came) == spent.forwarded < count, "more was offered than the rate takes"
    assert spent.dropped_by_queue == count - len(came)
    assert spent.dropped_by_model == 0
    assert len(came) * size * 8 <= rate * elapsed + (queue + 3028) * 8


def test_connections_take_the_congestion_control_of_the_route(net):
    for name in ("reno", "cubic"):
        net.set_congestion(name)
        server = namespaces.open_socket(net.hosts[0].namespace, kind=socket.SOCK_STREAM)
        client = namespaces.open_socket(net.hosts[1].namespace, kind=socket.SOCK_STREAM)
        with server, client:
            server.bind((net.hosts[0].address, 0))
            server.listen()
            client.connect(server.getsockname())
            accepted, _ = server.accept()
            with accepted:
                for sock in (client, accepted):
                    used = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    assert used.rstrip(b"\0").decode() == name
    with pytest.raises(LabError, match=r"'vegass': this kernel offers .*cubic.*Remedy: modprobe"):
        net.set_congestion("vegass")


@needs_loss
def test_a_schedule_plays_while_a_block_runs(net):
    schedule = parse_schedule("bursts(loss=1,length=100ms,every=300ms,start=100ms)")
    with net.playing(schedule) as record:
        time.sleep(1.0)
    assert len(record) >= 2
    assert all(applied.full_s <= applied.clear_s for applied in record)
    assert not missing(net.hosts[0], net.hosts[1], 500).any(), "nothing holds after the block"
    nowhere = Schedule.of([(0.0, 9.0, parse_conditions("loss(1),links(h9)"))])
    with (
        pytest.raises(ConfigError, match="no link 'h9' in this star: known are h0, h1, h2"),
        net.playing(nowhere),
    ):
        time.sleep(0.1)


@needs_loss
def test_what_bursts_drop_is_counted_while_they_hold(net):
    with net.playing(parse_schedule("loss(2%),bursts(loss=0.5,length=300ms,every=600ms)")) as record:
        for _ in range(3):
            missing(net.hosts[0], net.hosts[1], 20_000, quiet_s=0.05)
    inside = [applied.inside for applied in record if applied.inside is not None]
    before = [applied.before for applied in record if applied.before is not None]
    for counters, share in ((inside, 0.5), (before, 0.02)):
        offered = sum(part.offered for part in counters)
        assert offered > 1000
        assert_binomial(sum(part.dropped_by_model for part in counters), offered, share)


def test_what_the_kernel_lacks_is_refused_with_the_remedy():
    if means.detect().netem:
        pytest.skip("this kernel has netem")
    with LabNetwork(Topology(kind="star", hosts=1), PREFIX) as net:
        for text in (
            "delay(1ms)",
            "jitter(1ms)",
            "reorder(1%,by=1ms)",
            "duplicate(1%)",
            "corrupt(1%)",
            "slot(1ms)",
        ):
            with pytest.raises(
                LabError, match=rf"{text.partition('(')[0]}.*needs tc's netem.*modprobe sch_netem"
            ):
                net.apply(parse_conditions(text))
    with (
        pytest.raises(LabError, match="topology: a delay needs tc's netem"),
        LabNetwork(Topology(kind="star", hosts=1, delay_s=0.001), PREFIX),
    ):
        pass
    assert not ours()


def test_a_discipline_that_the_kernel_lacks_is_refused():
    if not means.tried("tc", "qdisc", "add", "dev", "lo", "root", "prio"):
        pytest.skip("this kernel has prio")
    net = LabNetwork(Topology(kind="star", hosts=1, rate_bps=1e9, discipline="prio"), PREFIX)
    with pytest.raises(LabError, match=r"discipline='prio': this kernel refuses it .*modprobe sch_prio"), net:
        pass
    assert not ours()


def test_commands_run_on_their_host_and_end_with_the_network():
    with LabNetwork(Topology(kind="star", hosts=2), PREFIX) as net:
        done = net.popen(
            net.hosts[1], ["ip", "-br", "addr", "show", "eth0"], stdout=subprocess.PIPE, text=True
        )
        assert net.hosts[1].address in done.communicate(timeout=20)[0]
        # One that ignores SIGTERM, with a child of its own that would outlive it.
        stubborn = net.popen(net.hosts[0], ["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"])
        while not Path(f"/proc/{stubborn.pid}/task/{stubborn.pid}/children").read_text():
            time.sleep(0.01)
        child = int(Path(f"/proc/{stubborn.pid}/task/{stubborn.pid}/children").read_text().split()[0])
    assert stubborn.returncode is not None
    assert not running(child)
    for call in (
        net.counters,
        lambda: net.popen(net.hosts[0], ["true"]),
        lambda: net.apply(parse_conditions("")),
    ):
        with pytest.raises(ClosedError, match="removed already"):
            call()


def test_flows_of_a_leaf_spread_over_the_spines():
    with LabNetwork(topology("leaf-spine"), PREFIX) as net:
        source, target = net.hosts[0], net.hosts[3]
        with namespaces.open_socket(target.namespace) as inbox:
            inbox.bind((target.address, PORT))
            for _ in range(64):  # a new source port each
                with namespaces.open_socket(source.namespace) as out:
                    out.sendto(b"x", (target.address, PORT))
        points = net.counters().points
        shares = [points[f"l0s{spine}_up"].forwarded for spine in range(2)]
    assert sum(shares) == 64
    assert min(shares) > 10, "a fair coin is further off once in ten million runs"


def test_cross_traffic_fills_a_shallow_queue():
    with LabNetwork(topology("dumbbell", core_rate="50mbit", core_queue="16KB"), PREFIX) as net:
        before = net.counters()
        with CrossTraffic(net, Traffic(2e8, on_s=0.01, off_s=0.01)) as traffic:
            deadline = time.monotonic() + 30
            while (
                time.monotonic() < deadline
                and not (net.counters() - before).points["core_up"].dropped_by_queue
            ):
                time.sleep(0.05)
        spent = (net.counters() - before).points["core_up"]
    assert spent.dropped_by_queue > 0
    assert spent.dropped_by_model == 0
    assert traffic.sent >= spent.offered > 0
    assert traffic.sent - spent.offered <= 2000, "what waits before the sender's card was sent, too"
    with (
        LabNetwork(Topology(kind="star", hosts=1), PREFIX) as net,
        pytest.raises(LabError, match=r"no cross hosts\. Remedy: cross = 1"),
    ):
        CrossTraffic(net, Traffic(1e6))


RUN = """
import sys, time
from dblp.sim.lab.network import LabNetwork
from dblp.sim.lab.topology import Topology
with LabNetwork(Topology(kind="star", hosts=2), {prefix!r}) as net:
    child = net.popen(net.hosts[0], ["sleep", "600"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def start_run(prefix):
    """A process with a network and a child in it: the process, and the child's id."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN.format(prefix=prefix)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    line = run.stdout.readline()
    assert line, run.communicate()[1]
    return run, int(line)


def of(pid, prefix):
    return [name for name in namespaces.names() if namespaces.owner_of(name, prefix) == pid]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_ctrl_c_and_sigterm_leave_nothing(number, code):
    run, child = start_run(PREFIX)
    assert len(of(run.pid, PREFIX)) == 3
    run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == code
    assert not of(run.pid, PREFIX)
    assert not running(child)


@pytest.mark.processes
def test_what_a_killed_run_left_is_found_and_removed_by_the_next():
    prefix = "dblpkilled"
    remove_leftovers(prefix)
    run, child = start_run(prefix)
    names = of(run.pid, prefix)
    assert find_leftovers(prefix) == [], "its owner lives"
    run.kill()
    run.wait(60)
    for pipe in (run.stdout, run.stderr):
        pipe.close()
    assert find_leftovers(prefix) == names
    assert find_leftovers("dblpkille") == [], "of another prefix"
    with LabNetwork(Topology(kind="star", hosts=1), prefix):
        assert not of(run.pid, prefix)
    assert not running(child), "what ran in it has ended"


def test_folders_of_killed_runs_are_removed_with_their_namespaces(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"dblp-lab-{os.getpid()}-1-x"
    left.mkdir()
    assert remove_leftovers("dblpnobody") == [str(left)]
    assert not left.exists()


def test_a_process_that_got_the_id_of_a_killed_run_hides_nothing(monkeypatch):
    """The id of this process, and the start of another one."""
    mine, start = f"{namespaces.next_stem(PREFIX)}-h0", started(os.getpid())
    assert start is not None
    other = mine.replace(f"-{start}-", f"-{start - 1}-")
    gone = mine.replace(f"-{os.getpid()}-", "-4194305-")  # above the kernel's largest
    monkeypatch.setattr(namespaces, "names", lambda: [gone, mine, other, "somebodys", f"{PREFIX}-x"])
    assert find_leftovers(PREFIX) == [gone, other]
    assert namespaces.owner_of(other, PREFIX) == os.getpid()


@pytest.mark.processes
def test_without_root_there_is_a_message_and_an_exit_code():
    program = (
        "import os, sys, dblp.sim.lab.network as n, dblp.sim.lab.preflight as p\n"
        "from dblp.sim.lab.topology import Topology\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "print([f.what for f in p.preflight()])\n"
        "try:\n"
        "    with n.LabNetwork(Topology(kind='star', hosts=1)): pass\n"
        "except n.LabError as error:\n"
        "    print(error); sys.exit(error.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 77, done.stderr
    assert done.stderr == ""
    found, message = done.stdout.splitlines()
    assert found == "['root']"
    assert re.match(r"the laboratory cannot run here: root: no root .*Remedy: sudo", message)


def test_a_failure_while_building_leaves_nothing(monkeypatch):
    monkeypatch.setattr(
        "dblp.sim.lab.wiring.Wiring._split_packets",
        lambda self: (_ for _ in ()).throw(LabError("no ethtool")),
    )
    with pytest.raises(LabError, match="no ethtool"), LabNetwork(Topology(kind="star", hosts=2), PREFIX):
        pass
    assert not ours()


def test_the_hosts_own_network_is_never_taken_for_a_namespace():
    name = f"{namespaces.next_stem(PREFIX)}-h0"
    path = namespaces.path_of(name)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    subprocess.run(["mount", "--bind", "/proc/self/ns/net", path], check=True)
    try:
        with pytest.raises(LabError, match="is this host's own network: refused"):
            namespaces.inode_of(name)
        with pytest.raises(LabError, match="exists already: refused"):
            namespaces.create(name)
    finally:
        namespaces.remove(name)
    assert not path.exists()
    assert namespaces.processes([Path("/proc/self/ns/net").stat().st_ino]), "and nothing of it was ended"


@pytest.mark.parametrize("prefix", ["", "Dblp", "a-b", "x" * 17, "a/b"])
def test_unusable_prefixes_are_refused(prefix):
    with pytest.raises(ConfigError, match="needs a lower-case word"):
        LabNetwork(Topology(kind="star", hosts=1), prefix)


def test_networks_can_be_built_in_threads_side_by_side():
    built = []

    def build(index):
        with LabNetwork(Topology(kind="star", hosts=2), PREFIX) as net:
            built.append((index, len(send(net.hosts[0], net.hosts[1], 50))))

    threads = [threading.Thread(target=build, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built) == [(0, 50), (1, 50)]
    assert not ours()


def test_the_preflight_says_how_and_proves_single_datagrams():
    from dblp.sim.lab.preflight import preflight

    findings = {finding.what: finding for finding in preflight()}
    assert all(finding.ok for finding in findings.values() if finding.essential)
    proof = findings["single datagrams"]
    assert proof.ok, proof
    assert re.search(r"super-packet of (\d+) datagrams crossed .* as \1 packets", proof.found)
    for name in ("red", "prio"):
        assert findings[name].ok == (not means.refused_discipline(name))
    for finding in findings.values():
        assert finding.ok or (finding.consequence and finding.remedy), finding
    assert findings["loss"].found.startswith(
        {"nft": "nftables", "netem": "tc netem", "": "neither"}[means.detect().loss]
    )


def test_the_proof_sees_super_packets_that_pass_whole(monkeypatch):
    from dblp.sim.lab import preflight

    monkeypatch.setattr("dblp.sim.lab.wiring._SPLIT", ())
    findings = {finding.what: finding for finding in preflight.preflight()}
    assert not findings["single datagrams"].ok
    assert "as 1 packets" in findings["single datagrams"].found


def test_numpy_counts_runs():
    assert mean_run(np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], np.bool_)) == 2.0
