"""Models by name. All take images (n, 1, height, width) as float32 and give logits (n, 10)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

CLASSES = 10
_HIDDEN = 512
_CHANNELS = (32, 64)
_KERNEL = 3


def build(name: str, height: int, width: int, *, seed: int) -> nn.Module:
    """A model of ``MODELS`` for images of this size, with parameters drawn from ``seed``."""
    torch.manual_seed(seed)
    return MODELS[name](height, width)


def _mlp(height: int, width: int) -> nn.Module:
    """Two hidden layers: 300,000 parameters on 8 x 8 images."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(height * width, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, CLASSES),
    )


def _cnn(height: int, width: int) -> nn.Module:
    """Two convolutions and two linear layers: 150,000 parameters on 8 x 8 images."""
    first, second = _CHANNELS
    layers: list[nn.Module] = [nn.Conv2d(1, first, _KERNEL, padding=1), nn.ReLU()]
    if height > 8:  # large images are halved twice, small ones once
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    layers += [nn.Conv2d(first, second, _KERNEL, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    features = second * (height // 2) * (width // 2)
    return nn.Sequential(*layers, nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, CLASSES))


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": _mlp, "cnn": _cnn}
