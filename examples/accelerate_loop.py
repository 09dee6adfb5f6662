"""Hugging Face Accelerate: ``torchrun --nproc-per-node 2 -m examples.accelerate_loop``.

Accelerate takes the process group that it finds: make it of dblp before the Accelerator.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import dblp
from examples.digits import accuracy, digits, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("dblp")
    accelerator = Accelerator(cpu=True)
    train, test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attachment = dblp.attach(model, dblp.Bounded(0.1))  # what prepare returns is DDP's wrapper
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    if accelerator.is_main_process:
        logging.info("accuracy %.3f on %d ranks", accuracy(model, test), accelerator.num_processes)
        logging.info("backend %s, %s", dist.get_backend(), attachment.summary)
    accelerator.end_training()  # leaves the process group, too


if __name__ == "__main__":
    main()
