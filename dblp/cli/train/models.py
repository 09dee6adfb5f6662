"""Models by name. Those for images take them (n, 1, height, width) as float32 and give logits (n, classes)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from dblp.cli.train.transformer import Transformer

_HIDDEN = 512
_CHANNELS = (32, 64)
_STAGES = (16, 32, 64)
"""Channels of the residual blocks, one block a stage."""
_NORM_CHANNELS = 8
"""Channels that are normalised together."""
_KERNEL = 3


def build(name: str, shape: tuple[int, ...], classes: int, *, seed: int) -> nn.Module:
    """A model of ``MODELS`` for samples of this shape (height, width) or (context,), with parameters drawn from ``seed``."""
    torch.manual_seed(seed)
    return MODELS[name](shape, classes)


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers: 300,000 parameters on 8 x 8 images."""
    height, width = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(height * width, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, classes),
    )


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two linear layers: 150,000 parameters on 8 x 8 images."""
    height, width = shape
    first, second = _CHANNELS
    layers: list[nn.Module] = [nn.Conv2d(1, first, _KERNEL, padding=1), nn.ReLU()]
    if height > 8:  # large images are halved twice, small ones once
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    layers += [nn.Conv2d(first, second, _KERNEL, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    features = second * (height // 2) * (width // 2)
    return nn.Sequential(*layers, nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, classes))


def _resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three residual blocks (He et al., 2015) after one convolution: 80,000 parameters.

    Normalised by groups of channels (Wu and He, 2018), not by the batch: a rank's batch is small, and running statistics
    would be one more state that replicas must agree on.
    """
    stem_stride = (
        1 if shape[0] <= 8 else 2
    )  # large images are halved once more, as small ones cost too little to need it
    layers: list[nn.Module] = [
        nn.Conv2d(1, _STAGES[0], _KERNEL, stride=stem_stride, padding=1, bias=False),
        _norm(_STAGES[0]),
        nn.ReLU(),
    ]
    for before, after in zip((_STAGES[0], *_STAGES), _STAGES, strict=False):
        layers.append(_Residual(before, after, stride=1 if before == after else 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_STAGES[-1], classes))


class _Residual(nn.Module):
    """Two convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self._path = nn.Sequential(
            nn.Conv2d(before, after, _KERNEL, stride=stride, padding=1, bias=False),
            _norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, _KERNEL, padding=1, bias=False),
            _norm(after),
        )
        same = before == after and stride == 1
        self._shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), _norm(after))
        )

    def forward(self, images: Tensor) -> Tensor:
        """(n, before, h, w) to (n, after, h / stride, w / stride)."""
        return relu(self._path(images) + self._shortcut(images))


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // _NORM_CHANNELS, channels)


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet": _resnet,
    "transformer": Transformer.for_windows,
}
