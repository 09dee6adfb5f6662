"""What the examples train: a small classifier of the 8x8 digits that scikit-learn ships."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

TRAIN = 1536
"""Images to train on; the other 261 are to test."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: (images, 64) float32 in [0, 1], and labels."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[first], labels[first]), TensorDataset(images[rest], labels[rest])


def network() -> torch.nn.Sequential:
    """A perceptron of two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """Share of the test images that are classified right."""
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
