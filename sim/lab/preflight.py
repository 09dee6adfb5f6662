"""Whether this host can hold a laboratory, how loss, rate and delay will be done, and what to do about what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dblp.errors import LocalError
from dblp.installed import pip_line
from dblp.sim.lab import means, tools
from dblp.sim.lab.tools import LabError, PrivilegeError

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
_STATUS = Path("/proc/self/status")
_TRY_ECMP = """
ip link set lo up
ip addr add 10.0.0.1/24 dev lo
echo 1 > /proc/sys/net/ipv4/fib_multipath_hash_policy
ip route add 10.9.0.0/16 nexthop via 10.0.0.2 dev lo nexthop via 10.0.0.3 dev lo
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    """What is there, or how it will be done and why."""
    consequence: str = ""
    """What cannot be done without it; empty if it is there."""
    remedy: str = ""
    """A command to type, or a sentence."""
    essential: bool = False
    """No laboratory without it."""


def preflight(*, prove: bool = True) -> list[Finding]:
    """All findings, essential ones first. ``prove``: also build a throw-away network and send a super-packet through it.

    Without root only that is said. Nothing of the host's own network is touched.
    """
    found = list(_essentials())
    if any(finding.essential and not finding.ok for finding in found):
        return found
    found += _ways(means.detect())
    found += _extras()
    if prove:
        found.append(_proof())
    return found


def require() -> None:
    """Raise PrivilegeError without root, LabError where something essential is missing: one message, with remedies."""
    missing = [finding for finding in _essentials() if finding.essential and not finding.ok]
    if missing:
        lines = [f"{finding.what}: {finding.found}. Remedy: {finding.remedy}" for finding in missing]
        error = LabError if _is_root() else PrivilegeError
        raise error("the laboratory cannot run here: " + "; ".join(lines))


def _essentials() -> Iterator[Finding]:
    root = _is_root()
    yield Finding(
        what="root",
        ok=root,
        found="CAP_NET_ADMIN and CAP_SYS_ADMIN" if root else "no root (CAP_NET_ADMIN, CAP_SYS_ADMIN)",
        consequence=""
        if root
        else "no network namespaces; DBLP_IMPAIR impairs dblp's own datagrams without root",
        remedy="" if root else "sudo -E env PATH=$PATH, then the same command",
        essential=True,
    )
    if not root:
        return
    for name in ("nsenter", "unshare", "ip", "tc", "ethtool"):
        yield _command(name, essential=True)
    yield _package("pyroute2", essential=True)
    refused = means.tried("ip", "link", "set", "lo", "up")
    yield Finding(
        what="namespaces",
        ok=not refused,
        found=refused or "one was made and is gone again",
        consequence="no network can be built" if refused else "",
        remedy="a kernel with CONFIG_NET_NS; in a container: --privileged" if refused else "",
        essential=True,
    )
    refused = means.tried("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    refused = refused or means.tried("ip", "link", "add", "b0", "type", "bridge")
    yield Finding(
        what="veth and bridge",
        ok=not refused,
        found=refused or "both can be made",
        consequence="no network can be built" if refused else "",
        remedy="modprobe veth bridge" if refused else "",
        essential=True,
    )


def _ways(ways: means.Means) -> list[Finding]:
    """How loss, rate and delay will be done here."""
    loss = {
        "netem": "tc netem, a hop behind the sender",
        "nft": f"nftables where packets pass the bridge, since netem is refused ({ways.why})",
        "": f"neither netem ({ways.why}) nor nftables",
    }[ways.loss]
    return [
        Finding(
            what="loss",
            ok=bool(ways.loss),
            found=loss,
            consequence="" if ways.loss else "no loss: experiments that claim one are refused",
            remedy="" if ways.loss else "apt install nftables",
        ),
        Finding(
            what="rate",
            ok=ways.tbf,
            found="tbf before each link" if ways.tbf else "tbf is refused",
            consequence="" if ways.tbf else "no rates and no queues",
            remedy="" if ways.tbf else "modprobe sch_tbf",
        ),
        Finding(
            what="delay",
            ok=ways.netem,
            found="tc netem" if ways.netem else f"not at all: netem is refused ({ways.why})",
            consequence=""
            if ways.netem
            else "no delay, jitter, reordering, duplicates, corruption, slots: what needs them is refused",
            remedy=""
            if ways.netem
            else "modprobe sch_netem  # Debian: linux-image without -cloud; Fedora: kernel-modules-extra",
        ),
    ]


def _extras() -> list[Finding]:
    return [_command("nft"), *_routing(), *_disciplines()]


def _routing() -> Iterator[Finding]:
    said = means.tried("sh", "-e", "-c", _TRY_ECMP)
    yield Finding(
        what="ECMP",
        ok=not said,
        found=said or "several gateways a route, chosen by a hash of addresses and ports",
        consequence="leaf-spine spreads no flows" if said else "",
        remedy="a kernel with CONFIG_IP_ROUTE_MULTIPATH" if said else "",
    )


def _disciplines() -> Iterator[Finding]:
    """Of a topology's queues."""
    for name, does in (("red", "marks ECN before it drops"), ("prio", "four bands by DSCP")):
        said = means.refused_discipline(name)
        yield Finding(
            what=name,
            ok=not said,
            found=said or f"{does}, below tbf",
            consequence=f"no topology with discipline = '{name}'" if said else "",
            remedy=f"modprobe sch_{name}" if said else "",
        )


def _proof() -> Finding:
    """Send one super-packet from host to host and count what crosses the bridge."""
    from dblp.sim.lab import proof

    try:
        sent, crossed = proof.split_packets()
    except LocalError as error:
        return Finding(
            what="single datagrams",
            ok=False,
            found=str(error),
            consequence="a loss may hit whole trains of datagrams",
        )
    ok = sent == crossed
    return Finding(
        what="single datagrams",
        ok=ok,
        found=f"a super-packet of {sent} datagrams crossed a throw-away network as {crossed} packets",
        consequence="" if ok else "a loss hits whole trains of datagrams, and is not what it says",
        remedy=""
        if ok
        else "ethtool -K DEVICE tx-udp-segmentation off is without effect here: another kernel",
    )


def _command(name: str, *, essential: bool = False) -> Finding:
    path = tools.find(name)
    return Finding(
        what=name,
        ok=path is not None,
        found=path or f"no command {name}",
        consequence=""
        if path
        else "no network can be built"
        if essential
        else "no loss where the kernel has no netem",
        remedy="" if path else f"apt install {tools.PACKAGES[name]}",
        essential=essential,
    )


def _package(name: str, *, essential: bool) -> Finding:
    there = find_spec(name) is not None
    return Finding(
        what=name,
        ok=there,
        found="installed" if there else "not installed",
        consequence="" if there else "no network can be built",
        remedy="" if there else pip_line("lab"),
        essential=essential,
    )


def _is_root() -> bool:
    """CAP_NET_ADMIN and CAP_SYS_ADMIN, by the kernel's own word."""
    try:
        lines = _STATUS.read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(mask >> CAP_NET_ADMIN & 1) and bool(mask >> CAP_SYS_ADMIN & 1)
