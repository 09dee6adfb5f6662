"""Ray Train on a local Ray: ``python -m examples.ray_train``. On a cluster, ``ray.init`` finds it; the rest stays.

Ray's workers import torch, and torch's entry point then knows the backend "dblp" there too.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import ray
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader

import dblp
from examples.digits import accuracy, digits, network


def train(config: dict[str, Any]) -> None:
    """One worker."""
    data, test = digits()
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = ray.train.torch.prepare_model(network())
    attachment = dblp.attach(model, dblp.Bounded(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(config["epochs"]):
        attachment.epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        ray.train.report({"accuracy": accuracy(model, test)})
    if ray.train.get_context().get_world_rank() == 0:  # Ray brings the workers' lines to the driver
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        ranks = torch.distributed.get_world_size()
        logging.info("accuracy %.3f on %d ranks", accuracy(model, test), ranks)
        logging.info("backend %s, %s", torch.distributed.get_backend(), attachment.summary)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    ray.init(num_cpus=options.ranks + 1, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        torch_config=TorchConfig(backend="dblp"),
        scaling_config=ScalingConfig(num_workers=options.ranks),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
