"""Layer shapes of published models, and traces made from them (``dblp sim trace``).

ResNet-50: He et al., CVPR 2016, table 1 (stride in the 3x3 convolution, as in torchvision). VGG-16: Simonyan and Zisserman
2015, configuration D. GPT-2 small: Radford et al. 2019, output embedding tied to the input's. Batch normalisation's
parameters are with their convolution. FLOPs count a multiplication and its addition as two, of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dblp.errors import ConfigError

FLOAT32 = 4
RATE = 7.85e12
"""FLOP/s that a step is computed at: half of a V100's 15.7e12 of float32."""
BATCH = {"resnet50": 32, "vgg16": 32, "gpt2": 4}
"""Samples of a step and worker."""
Shape = tuple[str, int, float]
"""Name, parameters, FLOPs of the forward pass."""


def make_trace(model: str, batch: int = 0, rate: float = RATE) -> dict[str, Any]:
    """The trace of a model as its JSON has it: ``step_s`` is both passes' FLOPs of a batch over a rate. Raises ConfigError."""
    if model not in _MODELS:
        raise ConfigError(f"model {model!r}: known are {', '.join(_MODELS)}")
    layers = list(_MODELS[model]())
    batch = batch or BATCH[model]
    total = sum(flops for _, _, flops in layers)
    return {
        "name": model,
        "source": f"published shapes; a batch of {batch}, three times the forward pass's FLOPs at {rate:g} FLOP/s",
        "step_s": 3.0 * total * batch / rate,
        "layers": [
            {"name": name, "bytes": FLOAT32 * parameters, "flops": flops}
            for name, parameters, flops in layers
        ],
    }


def _convolution(name: str, kernel: int, before: int, after: int, side: int, extra: int) -> Shape:
    """``side``: of the output; ``extra``: parameters for each output channel besides the kernel's."""
    weights = kernel * kernel * before * after
    return name, weights + extra * after, 2.0 * weights * side * side


def _linear(name: str, before: int, after: int, times: int = 1) -> Shape:
    return name, (before + 1) * after, 2.0 * before * after * times


def resnet50() -> Iterator[Shape]:
    """Stem, 16 bottleneck blocks, classifier."""
    norm = 2
    yield _convolution("conv1", 7, 3, 64, 112, norm)
    channels, side = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            place = f"layer{stage}.{block}"
            before = side
            side = side // 2 if stage > 1 and block == 0 else side
            yield _convolution(f"{place}.conv1", 1, channels, width, before, norm)
            yield _convolution(f"{place}.conv2", 3, width, width, side, norm)
            yield _convolution(f"{place}.conv3", 1, width, 4 * width, side, norm)
            if block == 0:
                yield _convolution(f"{place}.downsample", 1, channels, 4 * width, side, norm)
            channels = 4 * width
    yield _linear("fc", channels, 1000)


def vgg16() -> Iterator[Shape]:
    """13 convolutions with biases, three linear layers."""
    channels, side = 3, 224
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for number in range(count):
            yield _convolution(f"conv{stage}.{number}", 3, channels, width, side, 1)
            channels = width
        side //= 2
    yield _linear("fc1", channels * side * side, 4096)
    yield _linear("fc2", 4096, 4096)
    yield _linear("fc3", 4096, 1000)


def gpt2() -> Iterator[Shape]:
    """Embeddings, 12 blocks of width 768, final norm; the output's product costs what its width times the vocabulary is."""
    width, tokens, vocabulary, blocks = 768, 1024, 50_257, 12
    yield "embeddings", (vocabulary + tokens) * width, 2.0 * vocabulary * width * tokens
    for block in range(blocks):
        place = f"h{block}"
        name, parameters, flops = _linear(f"{place}.attention", width, 3 * width, tokens)
        mixing = 4.0 * tokens * tokens * width
        yield name, parameters + 2 * width, flops + mixing
        yield _linear(f"{place}.projection", width, width, tokens)
        name, parameters, flops = _linear(f"{place}.mlp1", width, 4 * width, tokens)
        yield name, parameters + 2 * width, flops
        yield _linear(f"{place}.mlp2", 4 * width, width, tokens)
    yield "norm", 2 * width, float(tokens * width)


_MODELS: dict[str, Callable[[], Iterator[Shape]]] = {"resnet50": resnet50, "vgg16": vgg16, "gpt2": gpt2}
