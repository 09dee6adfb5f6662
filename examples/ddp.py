"""DistributedDataParallel by torchrun, on one host or many: ``torchrun --nproc-per-node 2 -m examples.ddp``.

Trains a small classifier on the digits that scikit-learn ships. ``--policy`` lets gradients lose something; ``--backend gloo``
trains the same over TCP, to compare.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dblp
from examples.digits import accuracy, digits, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--policy", default="default", help="a policy's name, such as exact or ltp")
    parser.add_argument("--backend", default="dblp", choices=("dblp", "gloo"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group(options.backend)  # torchrun has set the rest
    train, test = digits()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = None
    if options.backend == "dblp":
        attachment = dblp.attach(model, options.policy, optimizer=optimizer)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        if attachment is not None:
            attachment.epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    step_ms = 1e3 * (time.perf_counter() - start) / (options.epochs * len(loader))
    if dist.get_rank() == 0:
        logging.info("accuracy %.3f on %d ranks", accuracy(model, test), dist.get_world_size())
        logging.info("%.1f ms a step over %s", step_ms, options.backend)
        if attachment is not None:
            logging.info("%s", attachment.summary)
            logging.info("the last: %s", attachment.reports[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
