"""What came out of an arm with a seed: the ranks' results put together, checked and summed up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.cli.launch import WorkerError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One arm with one seed, over all ranks."""

    arm: str
    seed: int
    test_accuracy: float
    test_perplexity: float | None
    """Of the test set's next characters; None for images."""
    wall_s: float
    """Time of all epochs with their tests, without start-up: the slowest rank's."""
    losses: Floats
    """Training loss of each epoch, mean over the ranks (epochs,)."""
    accuracies: Floats
    """Test accuracy after each epoch (epochs,)."""
    allreduce_s: Floats
    """Times of all rounds on all ranks (ranks * rounds,)."""
    rounds: int
    """Rounds of one rank."""
    network_loss: float | None
    """Share of the datagrams, repeats and control included, that the impairment dropped."""
    missing_share: float | None
    """Share of the gradient chunks that peers sent and receivers did without."""
    retransmitted_share: float | None
    """Retransmissions as a share of all chunks sent."""
    compression_ratio: float | None = None
    """Bytes of the gradients over those of what ranks put into their rounds; None without compression."""

    def record(self) -> dict[str, Any]:
        """The flat record of this outcome for JSON."""
        return {
            "arm": self.arm,
            "seed": self.seed,
            "test_accuracy": self.test_accuracy,
            "test_perplexity": self.test_perplexity,
            "wall_s": self.wall_s,
            "allreduce_p50_s": float(np.percentile(self.allreduce_s, 50)),
            "allreduce_p99_s": float(np.percentile(self.allreduce_s, 99)),
            "network_loss": self.network_loss,
            "missing_share": self.missing_share,
            "retransmitted_share": self.retransmitted_share,
            "compression_ratio": self.compression_ratio,
            "rounds": self.rounds,
        }


class Collector:
    """Takes the ranks' ``result`` events and gives an Outcome as soon as an arm's are complete."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._results: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self.outcomes: list[Outcome] = []
        """In the order in which they were completed."""

    def add(self, rank: int, event: dict[str, Any]) -> Outcome | None:
        """Take a rank's result; returns the Outcome it completes. Raises WorkerError if replicas differ."""
        results = self._results[event["arm"], event["seed"]]
        results[rank] = event
        if len(results) < self._ranks:
            return None
        outcome = combine([results[rank] for rank in sorted(results)])
        self.outcomes.append(outcome)
        return outcome


def combine(results: Sequence[dict[str, Any]]) -> Outcome:
    """Put the ranks' results of an arm and seed together, in rank order; WorkerError if replicas differ."""
    _check_replicas(results)
    first = results[0]
    traffic = _total([result["traffic"] for result in results])
    return Outcome(
        arm=first["arm"],
        seed=first["seed"],
        test_accuracy=first["test_accuracy"],
        test_perplexity=first["test_perplexity"],
        wall_s=max(result["wall_s"] for result in results),
        losses=np.mean([result["losses"] for result in results], axis=0),
        accuracies=np.asarray(first["accuracies"], np.float64),
        allreduce_s=np.concatenate([np.asarray(result["allreduce_s"], np.float64) for result in results]),
        rounds=len(first["allreduce_s"]),
        network_loss=_share(traffic, "datagrams_lost", "datagrams_offered"),
        missing_share=_share(traffic, "chunks_missing", "chunks_expected"),
        retransmitted_share=_share(traffic, "chunks_resent", "chunks_sent"),
        compression_ratio=_share(traffic, "gradient_bytes", "payload_bytes"),
    )


def _check_replicas(results: Sequence[dict[str, Any]]) -> None:
    """Every rank must hold the same parameters, to the bit (contract C3)."""
    prints = [result["fingerprint"] for result in results]
    if len(set(prints)) > 1:
        usual = Counter(prints).most_common(1)[0][0]
        odd = [str(rank) for rank, value in enumerate(prints) if value != usual]
        where = f"arm {results[0]['arm']}, seed {results[0]['seed']}"
        raise WorkerError(
            f"{where}: replicas differ: rank {', '.join(odd)} holds other parameters than the rest"
        )


def _total(traffics: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    total: Counter[str] = Counter()
    for traffic in traffics:
        if traffic is None:
            return None
        total.update(traffic)
    return dict(total)


def _share(traffic: dict[str, float] | None, part: str, whole: str) -> float | None:
    if traffic is None or not traffic.get(whole):
        return None
    return traffic[part] / traffic[whole]
