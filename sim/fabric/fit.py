"""Whether the parts of a scenario fit together: what takes the fabric, or a file, to tell.

An experiment asks when it is read, for the engine that runs it; the engines ask again before they run.
"""

from __future__ import annotations

from dblp.errors import ConfigError
from dblp.sim.fabric.scenario import Scenario
from dblp.sim.fabric.size import check_size
from dblp.sim.fabric.spec import check
from dblp.sim.fabric.topology import Fabric, make_fabric
from dblp.sim.fabric.traces import load_trace


def check_fit(scenario: Scenario) -> None:
    """Raise ConfigError that names the field: links that fail are there, groups divide the ranks, the trace can be
    read, memory holds the flows."""
    load = scenario.workload
    if load.kind == "training":
        load_trace(load.model)
    check_size(scenario)
    grouped = load.kind in ("all_reduce", "training") and load.algorithm == "hierarchical"
    if scenario.failures or grouped:
        fabric = make_fabric(scenario.topology)
        failed_links(scenario, fabric)
        if grouped:
            group = group_of(scenario, fabric)
            check(
                scenario.ranks % group == 0, "workload.group", group, f"{scenario.ranks} ranks are no multiple of it"
            )  # fmt: skip
            check_size(scenario, group)


def failed_links(scenario: Scenario, fabric: Fabric) -> list[list[int]]:
    """The links of each failure."""
    found = []
    for number, failure in enumerate(scenario.failures):
        try:
            found.append(fabric.links_of(failure.link, one_way=failure.one_way))
        except ConfigError as error:
            raise ConfigError(f"failures[{number}].{error}") from None
    return found


def group_of(scenario: Scenario, fabric: Fabric) -> int:
    """Ranks of a group of a hierarchical all-reduce: as told, or those under the first rank's leaf."""
    leaves = fabric.leaves()[: scenario.ranks]
    return scenario.workload.group or int((leaves == leaves[0]).sum())
