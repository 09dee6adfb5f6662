"""PyTorch Lightning: ``python -m examples.lightning_ddp``. The strategy names the backend, a callback attaches the policy.

On several hosts start it as any Lightning script (torchrun, Slurm); dblp starts no cluster of its own.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import dblp
from dblp.collectives.torch.checkpoint import gather_state
from examples.digits import accuracy, digits, network


class Attach(pl.Callback):
    """Attaches a policy to the model once Lightning has wrapped it, and saves the attachment's state with its checkpoints."""

    def __init__(self, policy: dblp.Policy | str) -> None:
        self.policy = policy
        self.attachment: dblp.Attachment | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment = dblp.attach(trainer.strategy.model, self.policy)
        if self._state:
            self.attachment.load_state_dict(self._state)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.attachment is not None
        self.attachment.epoch(trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks; the checkpoint is rank 0's, so it gets what all of them carry."""
        if self.attachment is None:
            return self._state
        return gather_state(self.attachment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", help="write a checkpoint there")
    parser.add_argument("--resume", help="go on from it, to --epochs in all")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train, test = digits()
    attach = Attach(dblp.Bounded(0.1))
    trainer = pl.Trainer(
        strategy=DDPStrategy(process_group_backend="dblp"),
        accelerator="cpu",
        devices=options.ranks,
        max_epochs=options.epochs,
        callbacks=[attach],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=32), ckpt_path=options.resume)
    if options.save:
        trainer.save_checkpoint(options.save)
    if trainer.is_global_zero:
        logging.info("accuracy %.3f on %d ranks", accuracy(model, test), trainer.world_size)
        logging.info("backend %s, %s", torch.distributed.get_backend(), attach.attachment.summary)  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
