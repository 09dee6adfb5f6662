"""Several workers in one process: the same training as one worker's, and gradients as an all-reduce would get them."""

import dataclasses

import numpy as np
import pytest
import torch

from dblp.cli.train.data import load
from dblp.cli.train.loop import fingerprint
from dblp.cli.train.optimizers import optimizer
from dblp.cli.train.recipes import OPTIMIZERS, SGD
from dblp.cli.train.samples import Samples, loss_of
from dblp.cli.train.standin import StandIn, train

PLAN = StandIn(model="mlp", optimizer=SGD, lr=0.05, batch=64, steps=10, seed=1, constant=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models as small as these only wait for one another's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watched(Samples):
    """Keeps the model that is scored."""

    def score(self, model):
        self.model = model
        return super().score(model)


class Precise(Watched):
    """In float64: no step of AdamW, which divides small sums by their size, is made of rounding."""

    def batch(self, rows):
        inputs, targets = super().batch(rows)
        return inputs.double(), targets

    def build(self, model, *, seed):
        return super().build(model, seed=seed).double()

    def score(self, model):
        self.model = model


@pytest.fixture(scope="module")
def digits():
    return Watched(load("digits", None))


def average(gradients):
    return gradients.mean(0)


def parameters(samples):
    return torch.cat([parameter.detach().reshape(-1) for parameter in samples.model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_four_workers_train_as_one_worker_on_the_whole_batch(name):
    digits = Precise(load("digits", None))
    plan = dataclasses.replace(PLAN, optimizer=name, lr=1e-2)
    module = digits.build(plan.model, seed=plan.seed)
    chosen = optimizer(name, module.parameters(), plan.lr)
    order = np.random.default_rng((plan.seed, 0)).permutation(len(digits))
    for step in range(plan.steps):
        inputs, targets = digits.batch(order[step * plan.batch : (step + 1) * plan.batch])
        chosen.zero_grad()
        loss_of(module(inputs), targets).backward()
        chosen.step()
    train(plan, digits, average)
    alone = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    assert torch.allclose(parameters(digits), alone, atol=1e-6)


def test_it_learns_and_repeats_bit_for_bit(digits):
    plan = dataclasses.replace(PLAN, steps=50, constant=False)
    prints = []
    for _ in range(2):
        assert train(plan, digits, average).accuracy > 0.8
        prints.append(fingerprint(digits.model))
    assert prints[0] == prints[1]


def test_each_step_has_every_workers_own_gradient(digits):
    seen = []

    def all_reduce(gradients):
        seen.append(gradients.copy())
        return gradients.mean(0)

    train(dataclasses.replace(PLAN, steps=2), digits, all_reduce)
    assert len(seen) == 2
    assert seen[0].shape[0] == 4
    assert all(np.linalg.norm(seen[0][0] - seen[0][worker]) > 0.01 for worker in (1, 2, 3))


def test_steps_go_on_over_the_end_of_an_epoch(digits):
    count = 0

    def all_reduce(gradients):
        nonlocal count
        count += 1
        return gradients.mean(0)

    train(dataclasses.replace(PLAN, steps=len(digits) // 64 + 3), digits, all_reduce)
    assert count == len(digits) // 64 + 3


def test_workers_with_parameters_of_their_own_drift_as_their_averages_do(digits):
    """With equal averages they are the one model; a worker that got nothing in the first step is apart from then on."""
    plan = dataclasses.replace(PLAN, steps=4)
    train(plan, digits, average)
    alone, seen = parameters(digits), []

    def watch(step, replicas, score):
        seen.append((step, replicas.copy(), score().accuracy))

    plan = dataclasses.replace(plan, replicas=True)
    train(plan, digits, lambda gradients: np.repeat([gradients.mean(0)], 4, 0), watch)
    assert [step for step, _, _ in seen] == [1, 2, 3, 4]
    assert all((row == alone.numpy()).all() for row in seen[-1][1])
    assert seen[-1][2] > 0.1

    def uneven(gradients):
        averages = np.repeat([gradients.mean(0)], 4, 0)
        averages[3] *= bool(seen)
        return averages

    seen.clear()
    train(plan, digits, uneven, watch)
    last = seen[-1][1]
    assert (last[1] == last[0]).all() and (last[2] == last[0]).all()
    assert np.linalg.norm(last[3] - last[0]) > 1e-3


def test_a_watch_may_change_the_parameters(digits):
    plan = dataclasses.replace(PLAN, steps=2)

    def reset(step, replicas, score):
        replicas[:] = 0.5

    train(plan, digits, average, reset)
    assert (parameters(digits) == 0.5).all()
