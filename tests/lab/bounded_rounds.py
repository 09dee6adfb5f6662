"""A rank of a lab test: rounds of a bounded all-reduce on its host; prints what they lost, as one line of JSON.

A contribution that an owner missed stands in the owner's report alone; so the caller adds up the holes of all ranks.
"""

import hashlib
import json
import os
import sys

import numpy as np

import dblp
from dblp.transport.config import TransportConfig

ELEMENTS = 40_000
BUDGET = 0.1


def main(rounds: int) -> None:
    rank = int(os.environ["RANK"])
    dblp.init_process_group(config=TransportConfig.from_env())
    digest = hashlib.sha256()
    missing, resent, holes, short = [], 0, 0, 0
    for number in range(rounds):
        array = np.full(ELEMENTS, float((rank + 1) * (number + 1)), np.float32)
        report = dblp.all_reduce(array, policy=dblp.Bounded(BUDGET), timeout_s=120.0)
        digest.update(array.tobytes())
        missing.append(report.missing_share)
        resent += report.chunks_resent
        holes += report.missing_chunks + report.filled_chunks
        whole = (number + 1) * sum(range(1, dblp.get_world_size() + 1))
        exact = np.isclose(array, whole, rtol=1e-6)
        short += int((~exact).sum())
        assert exact.mean() >= 1 - 2 * BUDGET, f"round {number}: {exact.mean():.3f} of the sum is whole"
    dblp.destroy_process_group()
    sys.stdout.write(
        json.dumps(
            {
                "missing": missing,
                "digest": digest.hexdigest(),
                "resent": resent,
                "holes": holes,
                "short": short,
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
