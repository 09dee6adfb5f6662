"""DistributedDataParallel by torchrun, on one host or many: ``torchrun --nproc-per-node 2 -m examples.ddp``.

Trains a small classifier on the digits that scikit-learn ships. ``--policy`` lets gradients lose something.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dblp
from examples.digits import accuracy, digits, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--policy", default="default", help="a preset's name, such as exact or ltp")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("dblp")  # torchrun has set the rest
    train, test = digits()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = dblp.attach(model, options.policy, optimizer=optimizer)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        attachment.epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        logging.info("accuracy %.3f on %d ranks", accuracy(model, test), dist.get_world_size())
        logging.info("%s", attachment.summary)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
