"""The randomised Hadamard transform: against its matrix, its inverse, what is linear, what is kept, and what a loss becomes."""

import numpy as np
import pytest
import torch

from dblp.collectives.torch.hadamard import BLOCK, rotate_, unrotate_
from dblp.errors import ConfigError, UnsupportedError

LENGTHS = [0, 1, 2, 3, 64, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5, 70 * BLOCK, 70 * BLOCK + 123]
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error of an element after there and back, relative to the tensor's root mean square times 10."""


def normal(length, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(length)).to(dtype)


def hadamard_matrix(size):
    """Sylvester's construction, orthonormal (size, size)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.mark.parametrize("block", [1, 2, 8, 16, 32])
def test_columns_are_multiplied_by_hadamards_matrix_and_signs(block):
    unit = rotate_(torch.eye(block, dtype=torch.float64)[0].clone(), 7, block=block)
    assert torch.allclose(unit.abs(), torch.full_like(unit, block**-0.5))
    vector = normal(5 * block, torch.float64)
    signs = torch.stack(
        [rotate_(row.clone(), 7, block=block) for row in torch.eye(block, dtype=torch.float64)]
    )
    matrix = hadamard_matrix(block)
    diagonal = (signs @ matrix).diagonal()  # row i is the sign of i times row i of H
    assert torch.allclose(diagonal.abs(), torch.ones_like(diagonal))
    expected = matrix @ (diagonal[:, None] * vector.view(block, 5))
    assert torch.allclose(rotate_(vector.clone(), 7, block=block), expected.reshape(-1))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_inverse_gives_back_the_tensor(length, dtype):
    before = normal(length, dtype)
    rotated = rotate_(before.clone(), 5)
    error = unrotate_(rotated.clone(), 5).double() - before.double()
    assert rotated.dtype == dtype
    assert torch.all(error.abs() <= 10 * ROUNDING[dtype])
    if length > 2:
        assert not torch.allclose(rotated.double(), before.double(), atol=0.1)


@pytest.mark.parametrize("length", LENGTHS)
def test_norms_and_inner_products_are_kept(length):
    left, right = normal(length, torch.float64, 1), normal(length, torch.float64, 2)
    rotated = rotate_(left.clone(), 3), rotate_(right.clone(), 3)
    assert torch.allclose(rotated[0] @ rotated[1], left @ right)
    assert torch.allclose(rotated[0] @ rotated[0], left @ left)


def test_the_sum_of_transforms_is_the_transform_of_the_sum():
    parts = [normal(10_000, seed=seed) for seed in range(8)]
    together = rotate_(torch.stack(parts).sum(0), 9)
    apart = torch.stack([rotate_(part.clone(), 9) for part in parts]).sum(0)
    assert torch.allclose(together, apart, atol=1e-5)


def test_any_shape_is_transformed_in_place():
    tensor = normal(6000)
    square = tensor.clone().view(60, 100)
    assert rotate_(square, 1) is square
    assert torch.equal(square.view(-1), rotate_(tensor, 1))


def test_another_seed_gives_other_signs_and_the_same_seed_the_same():
    tensors = [rotate_(normal(5000), seed) for seed in (4, 4, 5)]
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.allclose(tensors[0], tensors[2], atol=0.1)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(rotate_(normal(300_000), 2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def lossy(tensor, chunk, lost, seed=11):
    """What comes out of a rotation when every chunk in ``lost`` is filled with zeros."""
    rotated = rotate_(tensor.clone(), seed)
    for index in lost:
        rotated[index * chunk : (index + 1) * chunk] = 0
    return unrotate_(rotated, seed)


def test_a_lost_chunk_takes_its_share_of_the_energy_wherever_the_energy_lies():
    """One layer of a thousand holds all: plain, a chunk takes all of its layer or nothing; rotated, all lose alike."""
    tensor = torch.zeros(64 * BLOCK)
    tensor[5000:5400] = normal(400) * 100
    chunks = len(tensor) // 364
    energies = []
    for index in (13, 14, 200, 500, chunks - 1):
        error = lossy(tensor, 364, [index]) - tensor
        energies.append(float(error.square().sum() / tensor.square().sum()))
    np.testing.assert_allclose(energies, 364 / len(tensor), rtol=0.5)


def test_a_loss_is_spread_evenly_over_all_elements():
    """10 % of the chunks: each element's error has about the same size, where without rotation a tenth is gone."""
    tensor, chunk = normal(64 * BLOCK), 364
    lost = np.random.default_rng(0).permutation(len(tensor) // chunk)[: len(tensor) // chunk // 10]
    error = lossy(tensor, chunk, lost) - tensor
    assert float(error.square().mean()) == pytest.approx(0.1, rel=0.1)
    assert (
        float(error.abs().max()) < 6 * 0.1**0.5
    )  # a normal variable's range; an element that is lost would show |x| up to 4.5
    parts = error.view(64, -1).square().mean(1)
    assert float(parts.min()) > 0.09
    assert float(parts.max()) < 0.11


def test_signs_make_an_unlucky_gradient_lose_no_more_than_others():
    """Without signs a constant gradient lies in one element of each column: its loss would take everything."""
    error = lossy(torch.ones(16 * BLOCK), 364, [0]) - 1.0
    assert float(error.square().sum()) / (16 * BLOCK) < 10 * 364 / (16 * BLOCK)


@pytest.mark.parametrize(
    ("tensor", "options", "error"),
    [
        (torch.ones(4, dtype=torch.int32), {}, UnsupportedError),
        (torch.ones(4, dtype=torch.complex64), {}, UnsupportedError),
        (torch.ones(4, 4).t()[:, :2], {}, UnsupportedError),
        (torch.ones(4, device="meta"), {}, UnsupportedError),
        (torch.ones(4), {"block": 12}, ConfigError),
        (torch.ones(4), {"block": 0}, ConfigError),
    ],
    ids=["int", "complex", "strided", "device", "block 12", "block 0"],
)
def test_what_cannot_be_rotated_is_refused_and_left_alone(tensor, options, error):
    with pytest.raises(error):
        rotate_(tensor, 0, **options)
    with pytest.raises(error):
        unrotate_(tensor, 0, **options)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(ConfigError, match="seed=-1"):
        rotate_(torch.ones(4), -1)
