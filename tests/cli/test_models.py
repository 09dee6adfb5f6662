"""Models: shapes for both image sizes, the same parameters from the same seed."""

import pytest
import torch

from dblp.cli.train.loop import fingerprint
from dblp.cli.train.models import MODELS, build
from dblp.cli.train.plan import MODEL_NAMES


def test_every_named_model_can_be_built():
    assert set(MODELS) == set(MODEL_NAMES)


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("size", [8, 28])
def test_logits_of_ten_classes_and_gradients_everywhere(name, size):
    model = build(name, size, size, seed=0)
    logits = model(torch.randn(5, 1, size, size, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (5, 10)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_parameters_depend_on_the_seed_alone(name):
    prints = [fingerprint(build(name, 8, 8, seed=seed)) for seed in (3, 3, 4)]
    assert prints[0] == prints[1] != prints[2]


def test_a_fingerprint_sees_one_bit():
    model = build("mlp", 8, 8, seed=0)
    before = fingerprint(model)
    with torch.no_grad():
        bias = next(model.parameters()).view(torch.int32)
        bias[0, 0] ^= 1
    assert fingerprint(model) != before
