"""Conditions on a network that is built: by nftables, tbf and netem, as the kernel allows; and the counters read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dblp.errors import ConfigError
from dblp.sim.lab import namespaces, nft, tools
from dblp.sim.lab.counters import Counters, LinkCounters
from dblp.sim.lab.impairments import Conditions, Slot
from dblp.sim.lab.means import Means, need_discipline
from dblp.sim.lab.plan import Plan, Point, Role, Shaper
from dblp.sim.lab.shaping import QdiscCounts, Stack, below_tbf, netem_text, read_counts, tbf_text
from dblp.sim.lab.tools import LabError
from dblp.transport.impair_spec import Corrupt, Delay, Duplicate, Jitter, Rate, Reorder

_NETEM_ONLY = (Delay, Jitter, Reorder, Duplicate, Corrupt, Slot)
_Device = tuple[str, str]  # node and device


class Impairer:
    """Raises LabError for what the kernel cannot do, with the remedy."""

    def __init__(self, plan: Plan, names: Mapping[str, str], means: Means) -> None:
        self.means = means
        self._plan = plan
        self._names = names
        self._roles = {node.name: node.role for node in plan.nodes}
        self._rulesets: dict[str, str] = {}
        self._stacks: dict[_Device, Stack] = {}
        self._before: dict[_Device, QdiscCounts] = {}
        """Counts of disciplines that were replaced."""
        self._returned: set[str] = set()
        """Points whose incoming packets take a detour through an ifb device, where netem can hold them."""
        if plan.topology.needs_delay:
            means.need_netem("topology: a delay")
        need_discipline(plan.topology.discipline)
        if not means.loss and not means.nft:
            raise LabError(
                f"loss: neither netem nor nftables works here ({means.why}). Remedy: apt install nftables"
            )
        if means.loss == "nft":
            for node in self._switching():
                self._nft(node, nft.base_ruleset(self._roles[node], self._points_of(node)))
        self.apply(Conditions())

    def apply(self, conditions: Conditions) -> None:
        """These, in place of earlier ones."""
        self._check(conditions)
        points = self._targets(conditions)
        if self.means.loss == "nft":
            for node in self._switching():
                losses = {p: conditions if p in points else Conditions() for p in self._points_of(node)}
                self._replace_rules(node, nft.loss_ruleset(self._roles[node], losses))
        wanted = {(s.node, s.device): self._stack(s, conditions, points) for s in self._plan.shapers}
        wanted |= self._incoming(conditions, points)
        self._put(wanted)

    def counters(self, *, full_queues: bool = True) -> Counters:
        """Read all back. Without ``full_queues``, drops of queues may be left out, where to read them takes more commands."""
        rules = self._read_rules()
        nodes = self._switching() if self.means.loss == "netem" else []
        queues = self._read_queues([node for node, _ in self._stacks] if full_queues else nodes)
        points = {point.name: self._count(point, rules, queues) for point in self._plan.points}
        for shaper in self._plan.shapers:
            if shaper.card:
                name = f"{shaper.link}_up"
                lost = queues.get((shaper.node, shaper.device), QdiscCounts()).dropped_by_queue
                points[name] += LinkCounters(0, 0, lost)
        hosts = {s.link for s in self._plan.shapers if s.card}
        return Counters(points, frozenset(f"{link}_down" for link in hosts))

    def _check(self, conditions: Conditions) -> None:
        unknown = [link for link in conditions.links if link not in self._plan.links]
        if unknown:
            raise ConfigError(
                f"conditions: no link {unknown[0]!r} in this {self._plan.topology.kind}: "
                f"known are {', '.join(self._plan.links)}"
            )
        for element in conditions.elements:
            if isinstance(element, _NETEM_ONLY):
                self.means.need_netem(str(element))
        if conditions.get(Rate) and not self.means.tbf:
            raise LabError("a rate needs tc's tbf, which this kernel refuses. Remedy: modprobe sch_tbf")

    def _targets(self, conditions: Conditions) -> frozenset[Point]:
        """Points that the conditions hold at."""
        if not conditions.links:
            hosts = {s.link for s in self._plan.shapers if s.card}
            return frozenset(p for p in self._plan.points if p.link in hosts and p.way == "down")
        return frozenset(
            p for p in self._plan.points if p.link in conditions.links and conditions.way in ("both", p.way)
        )

    def _stack(self, shaper: Shaper, conditions: Conditions, points: frozenset[Point]) -> Stack:
        """What a device of the plan needs: its own rate and delay, and what the conditions say."""
        rate, queue = self._rate(shaper, conditions)
        text = tbf_text(rate, queue)
        if text and not self.means.tbf:
            raise LabError("a rate needs tc's tbf, which this kernel refuses. Remedy: modprobe sch_tbf")
        if shaper.card:
            return Stack(tbf=text)
        below = below_tbf(self._plan.topology.discipline, rate, queue)
        if not self.means.netem:
            return Stack(tbf=text, below=below)
        point = next(
            p
            for p in self._plan.points
            if (p.node, p.device) == (shaper.node, shaper.device) and not p.ingress
        )
        here = conditions if point in points else Conditions()
        netem, fixed = netem_text(here, shaper.delay_s, rate, loses=self.means.loss == "netem")
        return Stack(netem, text, fixed, below)

    def _rate(self, shaper: Shaper, conditions: Conditions) -> tuple[float, int]:
        """A rate of the conditions wins over the link's own; a host's card keeps its deep queue."""
        element = conditions.get(Rate)
        hosts = {s.link for s in self._plan.shapers if s.card}
        named = shaper.link in conditions.links if conditions.links else shaper.link in hosts
        way = "up" if shaper.card else "down"
        if element is None or not named or (shaper.link in hosts and conditions.way not in ("both", way)):
            return shaper.rate_bps, shaper.queue_bytes
        return element.bps, shaper.queue_bytes if shaper.card else element.queue_bytes

    def _incoming(self, conditions: Conditions, points: frozenset[Point]) -> dict[_Device, Stack]:
        """netem for packets that come in: on ifb devices, made when first needed and kept."""
        if not self.means.netem:
            return {}
        wanted = {}
        for point in (p for p in self._plan.points if p.ingress):
            if point in points and conditions and point.name not in self._returned:
                self._detour(point)
            if point.name in self._returned:
                here = conditions if point in points else Conditions()
                netem, fixed = netem_text(here, 0.0, 0.0, loses=self.means.loss == "netem")
                wanted[(point.node, _ifb(point))] = Stack(netem, "", fixed)
        return wanted

    def _detour(self, point: Point) -> None:
        name = self._names[point.node]
        tools.run(["ip", "-n", name, "link", "add", _ifb(point), "type", "ifb"])
        tools.run(["ip", "-n", name, "link", "set", _ifb(point), "up"])
        lines = [
            f"qdisc add dev {point.device} handle ffff: ingress",
            f"filter add dev {point.device} parent ffff: protocol all u32 match u32 0 0 "
            f"action mirred egress redirect dev {_ifb(point)}",
        ]
        self._tc(point.node, lines)
        self._returned.add(point.name)

    def _put(self, wanted: Mapping[_Device, Stack]) -> None:
        """Change disciplines in place where that can be, so that counters and queued packets stay."""
        changed = {at: stack for at, stack in wanted.items() if self._stacks.get(at, Stack()) != stack}
        for node in dict.fromkeys(node for node, _ in changed):
            here = {device: stack for (at, device), stack in changed.items() if at == node}
            replaced = [d for d, stack in here.items() if self._old(node, d).shape != stack.shape]
            if any(self._old(node, device) != Stack() for device in replaced):
                self._keep_counts(node, replaced)
            lines = []
            for device, stack in here.items():
                if device in replaced and self._old(node, device) != Stack():
                    lines.append(f"qdisc del dev {device} root")
                lines += stack.lines(device, "add" if device in replaced else "change")
            self._tc(node, lines)
        self._stacks.update(changed)

    def _old(self, node: str, device: str) -> Stack:
        return self._stacks.get((node, device), Stack())

    def _keep_counts(self, node: str, devices: Iterable[str]) -> None:
        now = read_counts(self._qdiscs(node))
        for device in devices:
            before = self._before.get((node, device), QdiscCounts())
            self._before[(node, device)] = before + now.get(device, QdiscCounts())

    def _count(
        self, point: Point, rules: Mapping[str, int], queues: Mapping[_Device, QdiscCounts]
    ) -> LinkCounters:
        device = _ifb(point) if point.ingress else point.device
        queue = queues.get((point.node, device), QdiscCounts())
        if self.means.loss == "netem":
            return LinkCounters(queue.sent, queue.dropped_by_model, queue.dropped_by_queue)
        model = rules[f"model_{point.name}"]
        passed = rules[f"seen_{point.name}"] - model - queue.dropped_by_queue
        return LinkCounters(passed, model + queue.dropped_by_model, queue.dropped_by_queue)

    def _read_rules(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self.means.loss == "nft":
            for node in self._switching():
                family = nft.family_of(self._roles[node])
                command = self._inside(node, "nft", "-j", "list", "counters", "table", family, nft.TABLE)
                found |= nft.read_counters(tools.run_json(command))
        return found

    def _read_queues(self, nodes: Iterable[str]) -> dict[_Device, QdiscCounts]:
        found = dict(self._before)
        for node in dict.fromkeys(nodes):
            for device, counts in read_counts(self._qdiscs(node)).items():
                found[(node, device)] = found.get((node, device), QdiscCounts()) + counts
        return found

    def _qdiscs(self, node: str) -> list[dict[str, object]]:
        return list(tools.run_json(["tc", "-n", self._names[node], "-s", "-j", "qdisc", "show"]))

    def _replace_rules(self, node: str, ruleset: str) -> None:
        if self._rulesets.get(node) != ruleset:
            self._nft(node, ruleset)
            self._rulesets[node] = ruleset

    def _nft(self, node: str, ruleset: str) -> None:
        namespaces.run_in(self._names[node], ["nft", "-f", "-"], ruleset)

    def _tc(self, node: str, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if text:
            tools.run(["tc", "-n", self._names[node], "-batch", "-"], text)

    def _inside(self, node: str, *command: str) -> list[str]:
        return [
            "nsenter",
            f"--net={namespaces.path_of(self._names[node])}",
            "--",
            tools.need(command[0]),
            *command[1:],
        ]

    def _switching(self) -> list[str]:
        return [node.name for node in self._plan.nodes if node.role is not Role.HOST]

    def _points_of(self, node: str) -> list[Point]:
        return [point for point in self._plan.points if point.node == node]


def _ifb(point: Point) -> str:
    """The device that a point's incoming packets are led through."""
    return f"i{point.link}"
