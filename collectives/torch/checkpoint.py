"""The state of attachments beyond one rank: in distributed checkpoints, and for another number of ranks.

``Attachment.state_dict`` is one rank's own, and what a rank carries differs from rank to rank. Here the states of all ranks
become one. What was carried, and what a compression withheld, is summed by parameter: that is what is still owed to the model.
All else (policy, phases, counts) is that of the first rank, and alike on all but for totals that each rank counts for itself.

Loaded on W ranks, each takes the W-th part of every parameter's elements, times W over the number of ranks that saved: an
average over W ranks then gets what the average over the former ranks lacked. The factor is a power of two, and exact, where
both numbers are. Nothing is dropped, and the bound of the carry goes by the norm of what each rank has.

A velocity that all ranks have alike, bit for bit, is not shared out but whole on each: it counts once in the average, for any
number of ranks. DGC's are such of the parameters that it sends whole: made of the average, and replicas that had different ones
would drift apart.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dblp.errors import ConfigError

if TYPE_CHECKING:
    from dblp.collectives.torch.backend import DblpProcessGroup
    from dblp.collectives.torch.hook import Attachment

RANKS = "ranks"
"""Key of the number of ranks whose states a state is made of; a rank's own has none."""
_MERGED = "merged"
Entries = Mapping[str, Mapping[str, Any]]
"""What is held of each parameter: ``layers`` and ``velocity``, as in ``keyed.tensor_state``; in a state of several ranks also
``alike``: how many ranks have this velocity, which then stands for each of them, or 0 if it is their sum."""


class CheckpointState:
    """An attachment for ``torch.distributed.checkpoint`` (a Stateful): ``dcp.save({"model": ..., "dblp": CheckpointState(a)})``,
    and the same with ``dcp.load``. Both are collective, as ``dcp`` is; call them between iterations.

    ``elastic``: one state of all ranks, for any number of ranks. Otherwise each rank saves its own, which the same rank of the
    same number loads, and training goes on as if it had not stopped. Raises ConfigError for what is no attachment.
    """

    def __init__(self, attachment: Attachment, *, elastic: bool = True) -> None:
        if not hasattr(attachment, "place"):
            raise ConfigError(
                f"CheckpointState takes what dblp.attach returned, not {type(attachment).__name__}"
            )
        self._attachment = attachment
        rank, world_size = attachment.place
        self._key = _MERGED if elastic else f"rank {rank} of {world_size}"
        self._elastic = elastic

    def state_dict(self) -> dict[str, Any]:
        """What ``dcp`` writes; the key tells what it is."""
        state = gather_state(self._attachment) if self._elastic else self._attachment.state_dict()
        return {self._key: _to_bytes(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What ``dcp`` has read. Raises ConfigError as ``Attachment.load_state_dict`` does."""
        self._attachment.load_state_dict(_from_bytes(state_dict[self._key]))


def gather_state(attachment: Attachment) -> dict[str, Any]:
    """The states of all ranks as one, on all of them; collective."""
    state = attachment.state_dict()
    state[RANKS] = attachment.place[1]
    for holder in _holders(state):
        entries = holder["parameters"]
        for group in attachment.groups:
            entries = _reduced(entries, group)
        holder["parameters"] = entries
    return state


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, from what each rank's ``state_dict`` gave, in the order of the ranks.

    Raises ConfigError if there is none, if they are not of the same iteration, or if one was merged before.
    """
    if not states or not all(map(_is_own, states)):
        raise ConfigError("merge_states takes what attachment.state_dict() gave on each rank, of all ranks")
    if len({(state["version"], state["iterations"]) for state in states}) > 1:
        found = sorted({int(state["iterations"]) for state in states})
        raise ConfigError(f"merge_states: the ranks' states are of different iterations: {found}")
    merged = dict(states[0])
    merged[RANKS] = len(states)
    merged["carry"] = _merged([state["carry"] for state in states])
    if merged.get("compression") is not None:
        memory = _merged([state["compression"]["memory"] for state in states])
        merged["compression"] = {**merged["compression"], "memory": memory}
    return merged


def _is_own(state: object) -> bool:
    """One rank's state, not merged."""
    return (
        isinstance(state, Mapping) and RANKS not in state and {"version", "iterations", "carry"} <= set(state)
    )


def share_of(state: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """What rank ``rank`` of ``world_size`` loads of a merged state. Raises ConfigError if it is none."""
    share = dict(state)
    try:
        factor = world_size / int(share.pop(RANKS))
        share["carry"] = _cut(share["carry"], rank, world_size, factor)
        if share.get("compression") is not None:
            memory = _cut(share["compression"]["memory"], rank, world_size, factor)
            share["compression"] = {**share["compression"], "memory": memory}
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"this is no merged state of dblp.attach: {error!r}") from None
    return share


def _holders(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a state that hold something of each parameter; copies, which stand in ``state`` now."""
    state["carry"] = dict(state["carry"])
    holders = [state["carry"]]
    if state.get("compression") is not None:
        state["compression"] = dict(state["compression"])
        state["compression"]["memory"] = dict(state["compression"]["memory"])
        holders.append(state["compression"]["memory"])
    return holders


def _merged(held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = sorted({name for each in held for name in each["parameters"]})
    parameters = {
        name: _summed([each["parameters"][name] for each in held if name in each["parameters"]], len(held))
        for name in names
    }
    return {**held[0], "parameters": parameters}


def _summed(entries: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    ages = max(len(entry["layers"]) for entry in entries)
    layers = [
        _sum(entry["layers"][age] for entry in entries if len(entry["layers"]) > age) for age in range(ages)
    ]
    velocities = [entry["velocity"] for entry in entries if entry["velocity"] is not None]
    alike = ranks if len(velocities) == ranks and len(set(map(_digest, velocities))) == 1 else 0
    velocity = velocities[0].clone() if alike else _sum(velocities) if velocities else None
    return {"layers": layers, "velocity": velocity, "alike": alike}


def _digest(values: torch.Tensor) -> bytes:
    """Of all bits; tells zeros of either sign and NaNs apart, as equality of numbers would not."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).digest()


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *rest = tensors
    total = first.clone()
    for tensor in rest:
        total += tensor
    return total


def _reduced(entries: Entries, group: DblpProcessGroup) -> dict[str, Any]:
    """The sum of all ranks' entries, by exact rounds; ranks may hold different parameters, and ages of them."""
    told: list[Any] = [None] * group.size()
    mine = {name: _facts(entry) for name, entry in entries.items()}
    dist.all_gather_object(told, mine, group)
    reduced: dict[str, Any] = {}
    for name in sorted({name for each in told for name in each}):
        found = [each[name] for each in told if name in each]
        ages = max(facts["ages"] for facts in found)
        size, dtype = found[0]["size"], found[0]["dtype"]
        entry = entries.get(name, {"layers": [], "velocity": None})
        layers = [*entry["layers"], *[None] * (ages - len(entry["layers"]))]
        total = [_all_reduced(values, size, dtype, group) for values in layers]
        velocity, alike = entry["velocity"], 0
        counts, digests = {facts["alike"] for facts in found}, {facts["digest"] for facts in found}
        if (
            len(found) == group.size()
            and len(counts) == len(digests) == 1
            and None not in digests
            and 0 not in counts
        ):
            alike = counts.pop() * group.size()
        elif digests != {None}:
            if velocity is not None:
                velocity = velocity * max(entry.get("alike", 1), 1)
            velocity = _all_reduced(velocity, size, dtype, group)
        reduced[name] = {"layers": total, "velocity": velocity, "alike": alike}
    return reduced


def _facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the others have to know of one's entry. One's own velocity is alike on one rank."""
    size, dtype = _kind(entry)
    digest = None if entry["velocity"] is None else _digest(entry["velocity"])
    return {
        "ages": len(entry["layers"]),
        "digest": digest,
        "alike": entry.get("alike", 1),
        "size": size,
        "dtype": dtype,
    }


def _kind(entry: Mapping[str, Any]) -> tuple[int, torch.dtype]:
    held = entry["velocity"] if entry["velocity"] is not None else entry["layers"][0]
    return held.numel(), held.dtype


def _all_reduced(
    values: torch.Tensor | None, size: int, dtype: torch.dtype, group: DblpProcessGroup
) -> torch.Tensor:
    total = torch.zeros(size, dtype=dtype) if values is None else values.to(dtype, copy=True)
    group.allreduce([total]).wait()
    return total


def _cut(held: Mapping[str, Any], rank: int, world_size: int, factor: float) -> dict[str, Any]:
    def part(values: torch.Tensor) -> torch.Tensor:
        low, high = (values.numel() * index // world_size for index in (rank, rank + 1))
        cut = torch.zeros_like(values)
        cut[low:high] = values[low:high] * factor
        return cut

    parameters = {
        name: {
            "layers": [part(values) for values in entry["layers"]],
            "velocity": _velocity_part(entry, part),
        }
        for name, entry in held["parameters"].items()
    }
    return {**held, "parameters": parameters}


def _velocity_part(
    entry: Mapping[str, Any], part: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    velocity: torch.Tensor | None = entry["velocity"]
    if velocity is None:
        return None
    return velocity.clone() if entry.get("alike") else part(velocity)


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _from_bytes(content: Any) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ConfigError(f"this is no state of dblp.attach: {error!r}") from None
