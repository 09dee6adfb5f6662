"""Models: shapes for images and text, the same parameters from the same seed, what they learn and what they may not see."""

import numpy as np
import pytest
import torch

from dblp.cli.train.data import load
from dblp.cli.train.loop import fingerprint
from dblp.cli.train.models import MODELS, build
from dblp.cli.train.optimizers import one_cycle, optimizer
from dblp.cli.train.recipes import ADAMW, IMAGE_MODELS, MODEL_NAMES, OPTIMIZERS, SGD, recipe_of
from dblp.cli.train.samples import Samples, loss_of
from dblp.cli.train.text import CONTEXT, VOCABULARY

SHAPES = dict.fromkeys(IMAGE_MODELS, ((8, 8), 10)) | {"transformer": ((CONTEXT,), VOCABULARY)}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models as small as these only wait for one another's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits():
    return Samples(load("digits", None))


@pytest.fixture(scope="module")
def text():
    return Samples(load("text", None))


def characters(count, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, VOCABULARY, (count, CONTEXT)))


def test_every_named_model_can_be_built():
    assert set(MODELS) == set(MODEL_NAMES) == set(SHAPES)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("size", [8, 28])
def test_logits_of_ten_classes_and_gradients_everywhere(name, size):
    model = build(name, (size, size), 10, seed=0)
    logits = model(torch.randn(5, 1, size, size, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (5, 10)
    logits.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_of_every_next_character_and_gradients_everywhere():
    model = build("transformer", (CONTEXT,), VOCABULARY, seed=0)
    logits = model(characters(3))
    assert logits.shape == (3, CONTEXT, VOCABULARY)
    logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_character_is_told_from_those_before_it_alone():
    model = build("transformer", (CONTEXT,), VOCABULARY, seed=0)
    windows = characters(2)
    before = model(windows)
    windows[:, 40] = (windows[:, 40] + 1) % VOCABULARY
    after = model(windows)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-6)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_parameters_depend_on_the_seed_alone(name):
    prints = [fingerprint(build(name, *SHAPES[name], seed=seed)) for seed in (3, 3, 4)]
    assert prints[0] == prints[1] != prints[2]


def test_replicas_of_no_model_hold_state_beside_their_parameters():
    """A running statistic would differ from rank to rank, unseen by the fingerprint of the parameters."""
    for name in MODEL_NAMES:
        assert not list(build(name, *SHAPES[name], seed=0).buffers())


def test_a_fingerprint_sees_one_bit():
    model = build("mlp", (8, 8), 10, seed=0)
    before = fingerprint(model)
    with torch.no_grad():
        bias = next(model.parameters()).view(torch.int32)
        bias[0, 0] ^= 1
    assert fingerprint(model) != before


def test_a_score_of_a_model_that_knows_nothing(digits, text):
    """Equal logits: one class of ten is hit, and the perplexity is the size of the vocabulary."""
    for samples, classes in ((digits, 10), (text, VOCABULARY)):
        name = "mlp" if samples is digits else "transformer"
        model = samples.build(name, seed=0)
        with torch.no_grad():
            last = list(model.parameters())[-2:]
            for parameter in last:
                parameter.zero_()
        score = samples.score(model)
        assert score.accuracy < 0.2
        assert score.perplexity == (None if samples is digits else pytest.approx(classes, rel=1e-4))
        assert model.training


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", IMAGE_MODELS)
def test_models_learn_digits_in_two_epochs_with_each_optimiser(digits, model, name):
    recipe = recipe_of("digits", model)
    module = train(digits, model, name, recipe.lr[name], recipe.batch, steps=2 * len(digits) // recipe.batch)
    assert digits.score(module).accuracy > 0.8


def test_the_transformer_learns_what_follows_what(text):
    """40 steps: better than the commonest character (a quarter is spaces) and than no knowledge at all."""
    recipe = recipe_of("text", "transformer")
    model = train(text, "transformer", ADAMW, recipe.lr[ADAMW], 16, steps=40)
    score = text.score(model)
    assert score.accuracy > 0.25
    assert score.perplexity < 30


def train(samples, model, name, lr, batch, steps):
    module = samples.build(model, seed=0)
    chosen = optimizer(name, module.parameters(), lr)
    schedule = one_cycle(chosen, lr, steps)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        inputs, targets = samples.batch(rng.integers(0, len(samples), batch))
        chosen.zero_grad()
        loss_of(module(inputs), targets).backward()
        chosen.step()
        schedule.step()
    return module


def test_no_momentum_where_the_gradients_bring_it_along():
    """A constant gradient of 1: with momentum the second step is longer than the first, without it is the same."""
    for momentum, ratio in ((0.9, 2.71 / 1.9), (0.0, 1.0)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        chosen = optimizer(SGD, [parameter], 0.1, momentum=momentum)
        places = [0.0]
        for _ in range(2):
            parameter.grad = torch.ones(1)
            chosen.step()
            places.append(float(parameter.detach()))
        assert (places[2] - places[1]) / places[1] == pytest.approx(ratio, rel=2e-3)
