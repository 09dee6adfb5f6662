"""Writes the presets' part of docs/policies.md from the code: ``python docs/generate_policies.py``.

A test compares the page with ``page()``, so the part cannot fall behind the code.
"""

from __future__ import annotations

from pathlib import Path

from dblp.collectives.presets import Preset, preset, presets
from dblp.transport.policy import Fill, Policy, Short, Stop
from dblp.units import format_seconds

PAGE = Path(__file__).with_name("policies.md")
BEGIN = "<!-- made by python docs/generate_policies.py -->"
END = "<!-- end of what is made -->"

_HEAD = """\
| Preset | Leg budgets, reduce / gather | Stop | Consistency | Fill | Algorithm | Controller | Transport |
|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page: what it holds by hand, and the presets as the code has them."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{PAGE}: put the lines {BEGIN} and {END} around the presets' part")
    return f"{before}{BEGIN}\n\n{part()}\n{END}{after}"


def part() -> str:
    """The presets' part: a table, then the source and the differences of each."""
    found = [preset(name) for name in presets()]
    return _HEAD + "".join(map(_row, found)) + "".join(map(_differences, found))


def _row(made: Preset) -> str:
    policy = made.policy
    cells = [
        f"`{made.name}`",
        _budgets(made),
        _stop(policy),
        policy.consistency.value if policy.lossy else "-",
        _fill(policy),
        policy.algorithm,
        _controller(made),
        ", ".join(f"{name} {value}" for name, value in made.transport.items()) or "-",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _budgets(made: Preset) -> str:
    if not made.policy.lossy:
        return "0"
    legs = _legs(made.policy)
    return legs if made.tolerant is None else f"{legs}; tolerant phase {_legs(made.tolerant)}"


def _legs(policy: Policy) -> str:
    return f"{policy.reduce_leg_budget:.3g} / {policy.gather_leg_budget:.3g}"


def _stop(policy: Policy) -> str:
    if not policy.lossy:
        return "-"
    after = f", {format_seconds(policy.stop_after_s)}" if policy.stop is Stop.DEADLINE else ""
    short = f", below the bound {policy.short.value}" if policy.short is not Short.REPAIR else ""
    return f"{policy.stop.value}{after}{short}"


def _fill(policy: Policy) -> str:
    if not policy.lossy:
        return "-"
    parts = ["carry" if policy.carry is not None and policy.fill is Fill.ZERO else policy.fill.value]
    if policy.tags.value != "none":
        parts.append(f"tags {policy.tags.value}")
    if policy.hadamard:
        parts.append("Hadamard")
    return ", ".join(parts)


def _controller(made: Preset) -> str:
    if made.controller is None:
        return "-"
    controller = made.controller()
    detector, every = type(controller.detector).__name__, controller.interval.epochs
    return f"{detector}, {'each epoch' if every == 1 else f'every {every} epochs'}"


def _differences(made: Preset) -> str:
    lines = "".join(f"- {text}\n" for text in made.differences)
    return f"\n`{made.name}`: {made.source}.\n" + (f"Differences from the paper:\n\n{lines}" if lines else "")


if __name__ == "__main__":
    PAGE.write_text(page())
