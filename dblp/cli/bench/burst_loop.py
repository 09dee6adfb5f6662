"""The worker's side of ``dblp bench burst`` on sockets: fresh ports for each burst, gloo to meet between rounds."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dblp.cli.bench.burst_plan import SOCKETS, BurstPlan, Case
from dblp.cli.bench.burst_port import BurstPort
from dblp.cli.bench.burst_rounds import QUEUE, TIMEOUT_S, Rounds, port_seed, run_rounds
from dblp.cli.worker import Emit, Plan
from dblp.collectives.group import Group
from dblp.transport.config import TransportConfig
from dblp.transport.endpoint import Endpoint
from dblp.transport.impair import ImpairedPort, Impairer, parse_impair
from dblp.transport.port import Address, Port
from dblp.transport.udp import open_port


def work(plan: Plan, emit: Emit) -> None:
    """Run all cases; emits one ``case`` event for each (every rank)."""
    burst_plan = BurstPlan.from_json(plan)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=PrefixStore("burst", agent), rank=rank, world_size=world_size)
    try:
        for number, case in enumerate(burst_plan.cases(SOCKETS)):
            rounds: Rounds = []
            for burst in range(burst_plan.bursts):
                session = number * burst_plan.bursts + burst + 1
                rounds += asyncio.run(_run(case, burst_plan, burst, session))
            emit("case", number=number, rounds=rounds)
    finally:
        dist.destroy_process_group()


async def _run(case: Case, plan: BurstPlan, burst: int, session: int) -> Rounds:
    """The rounds around one burst of a case; ``session``: another for each call, the same on all ranks."""
    loop, rank, world_size = asyncio.get_running_loop(), dist.get_rank(), dist.get_world_size()
    config = case.config
    port = BurstPort(
        _link(config, plan, rank), loop, seed=port_seed(plan, burst, rank), control_too=plan.control_too
    )
    peers: list[Any] = [None] * world_size
    dist.all_gather_object(peers, [tuple(address) for address in port.addresses])
    endpoint = await Endpoint.connect(
        port,
        rank=rank,
        world_size=world_size,
        config=config,
        session=plan.seed << 32 | session,
        peers=[[Address(*address) for address in addresses] for addresses in peers],
    )
    try:
        group = Group(endpoint, timeout_s=TIMEOUT_S)
        return await run_rounds(group, port, case, plan, burst, lambda: asyncio.to_thread(dist.barrier))
    finally:
        await endpoint.close(linger_s=1.0)


def _link(config: TransportConfig, plan: BurstPlan, rank: int) -> Port:
    """A port on loopback behind the plan's link."""
    text = f"rate({plan.rate_bps:g}bit,queue={QUEUE}),delay({2.0 * plan.delay_s:g}s),seed({plan.seed * 64 + rank})"
    spec = parse_impair(text + (f",loss({plan.loss})" if plan.loss else ""))
    port = open_port(config, master=Address("127.0.0.1", 1))
    return ImpairedPort(port, Impairer(spec), asyncio.get_running_loop())
