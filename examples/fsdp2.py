"""FSDP2 by torchrun: ``torchrun --nproc-per-node 2 -m examples.fsdp2``.

Parameters are gathered exactly, gradients may lose up to a tenth. A checkpoint is written each epoch; ``--resume`` goes on from
it, on any number of ranks.
"""

# mypy: disable-error-code="attr-defined"
# torch.distributed's stubs miss names that it exports.

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import dblp
from examples.digits import accuracy, digits, network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("dblp")
    train, test = digits()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    attachment = dblp.attach(model, dblp.Bounded(0.1))
    if options.resume:
        load(options.checkpoint, model, optimizer, attachment)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if options.checkpoint is not None:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "dblp": dblp.CheckpointState(attachment)}
            dcp.save(state, checkpoint_id=options.checkpoint)
    found = accuracy(model, test)  # all ranks: the forward pass gathers parameters
    if dist.get_rank() == 0:
        logging.info("accuracy %.3f on %d ranks", found, dist.get_world_size())
        logging.info("%s", attachment.summary)
    dist.destroy_process_group()


def load(
    place: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, attachment: dblp.Attachment
) -> None:
    """Weights, the optimiser's moments, and what the attachment carries."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "dblp": dblp.CheckpointState(attachment)}
    dcp.load(state, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its checkpoints
    main()
