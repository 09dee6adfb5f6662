"""What ``dblp doctor`` says of a laboratory on this host: root, network namespaces, netem and nftables.

Nothing on the host is changed. As root a feature is tried in a network namespace that ends with the command;
without root the kernel's own lists are read, and where they don't tell, the answer is "unknown without root".
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from dblp.cli.checks import Check, Status, find_tool, runs

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
PROC_STATUS = Path("/proc/self/status")
PROC_MODULES = Path("/proc/modules")
MODULE_ROOT = Path("/lib/modules")
CONFIGS = (Path("/proc/config.gz"), Path("/boot") / f"config-{os.uname().release}")

_WITHOUT_LAB = "for experiments only; DBLP_IMPAIR impairs dblp's own datagrams without it, and without root"


def lab_checks() -> list[Check]:
    """Root, namespaces, netem, nftables."""
    root = may_administer()
    return [root_check(root), namespace_check(root), netem_check(root), nftables_check(root)]


def may_administer() -> bool:
    """Whether this process has CAP_NET_ADMIN and CAP_SYS_ADMIN (root, in most places)."""
    try:
        lines = PROC_STATUS.read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return os.geteuid() == 0
    return bool(mask >> CAP_NET_ADMIN & 1) and bool(mask >> CAP_SYS_ADMIN & 1)


def root_check(root: bool) -> Check:
    """Root is needed for the laboratory only."""
    if root:
        found = "yes (CAP_NET_ADMIN, CAP_SYS_ADMIN)"
        return Check(name="root", group="lab", status=Status.OK, found=found)
    return Check(
        name="root",
        group="lab",
        status=Status.MISSING,
        found="no; training needs none",
        costs=_WITHOUT_LAB,
        remedy="sudo dblp doctor",
    )


def namespace_check(root: bool) -> Check:
    """Network namespaces: several hosts on one."""
    if not Path("/proc/self/ns/net").exists():
        return Check(
            name="namespaces",
            group="lab",
            status=Status.MISSING,
            found="the kernel has no network namespaces",
            costs=_WITHOUT_LAB,
            remedy="A kernel with CONFIG_NET_NS.",
        )
    if not root:
        return _unknown("namespaces", "the kernel has them; whether they may be made is unknown without root")
    made, said = _in_namespace("true")
    if made:
        return Check(name="namespaces", group="lab", status=Status.OK, found="one was made and is gone again")
    return Check(
        name="namespaces",
        group="lab",
        status=Status.MISSING,
        found=said,
        costs=_WITHOUT_LAB,
        remedy="util-linux's unshare, and a container that may use it (--privileged).",
    )


def netem_check(root: bool) -> Check:
    """tc's netem: delay, loss and reordering by the kernel."""
    tc = find_tool("tc")
    if tc is None:
        return _missing_tool("tc netem", "tc", "iproute2")
    if not root:
        return _by_kernel_lists("tc netem", "sch_netem", "CONFIG_NET_SCH_NETEM")
    works, said = _in_namespace(tc, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    if works:
        return Check(name="tc netem", group="lab", status=Status.OK, found="tried in a namespace of its own")
    return Check(
        name="tc netem",
        group="lab",
        status=Status.MISSING,
        found="the kernel refuses it: " + said.removeprefix("Error: "),
        costs=_WITHOUT_LAB,
        remedy="modprobe sch_netem  # Debian: linux-image without -cloud; Fedora: kernel-modules-extra",
    )


def nftables_check(root: bool) -> Check:
    """nftables: loss by rules, with counters that prove it."""
    nft = find_tool("nft")
    if nft is None:
        return _missing_tool("nftables", "nft", "nftables")
    if not root:
        return _by_kernel_lists("nftables", "nf_tables", "CONFIG_NF_TABLES")
    works, said = _in_namespace(nft, "add", "table", "inet", "dblp_doctor")
    if works:
        return Check(name="nftables", group="lab", status=Status.OK, found="tried in a namespace of its own")
    return Check(
        name="nftables",
        group="lab",
        status=Status.MISSING,
        found="the kernel refuses it: " + said,
        costs=_WITHOUT_LAB,
        remedy="modprobe nf_tables",
    )


def kernel_has(module: str, option: str) -> bool | None:
    """Whether the kernel has a module, loaded, loadable or built in; None where its lists don't tell."""
    if any(line.split()[0] == module for line in _lines(PROC_MODULES)):
        return True
    folder = MODULE_ROOT / os.uname().release
    if folder.is_dir():
        builtin = any(line.endswith(f"/{module}.ko") for line in _lines(folder / "modules.builtin"))
        return builtin or any(folder.rglob(f"{module}.ko*"))
    config = _kernel_config()
    if f"{option}=y" in config:
        return True
    return False if f"# {option} is not set" in config else None


def _by_kernel_lists(name: str, module: str, option: str) -> Check:
    has = kernel_has(module, option)
    if has is None:
        return _unknown(name, "unknown without root")
    if has:
        found = f"the kernel has {module}; not tried, as that needs root"
        return Check(name=name, group="lab", status=Status.OK, found=found)
    return Check(
        name=name,
        group="lab",
        status=Status.MISSING,
        found=f"the kernel has no {module}",
        costs=_WITHOUT_LAB,
        remedy=f"A kernel with {option}.",
    )


def _missing_tool(name: str, tool: str, package: str) -> Check:
    return Check(
        name=name,
        group="lab",
        status=Status.MISSING,
        found=f"no command {tool}",
        costs=_WITHOUT_LAB,
        remedy=f"apt install {package}  # or your system's package of that name",
    )


def _unknown(name: str, found: str) -> Check:
    return Check(name=name, group="lab", status=Status.UNKNOWN, found=found, remedy="sudo dblp doctor")


def _in_namespace(*command: str) -> tuple[bool, str]:
    """Run a command in a network namespace of its own, which ends with it."""
    unshare = find_tool("unshare")
    return runs(unshare, "--net", *command) if unshare else (False, "no command unshare")


def _kernel_config() -> set[str]:
    for path in CONFIGS:
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        return set(text.decode(errors="replace").splitlines())
    return set()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
