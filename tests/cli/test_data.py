"""Data sets: shapes, ranges, the split, and what is said when files are missing."""

import numpy as np
import pytest

from dblp.cli.train.data import DATASETS, load
from dblp.cli.train.plan import DATA_NAMES, RECIPES
from dblp.errors import LocalError


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(head + array.tobytes())


@pytest.fixture
def fashion(tmp_path):
    """A folder of four tiny IDX files in Fashion-MNIST's names."""
    rng = np.random.default_rng(1)
    for part, count in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", rng.integers(0, 10, count).astype(np.uint8))
    return tmp_path


def test_every_named_data_set_has_a_loader_and_a_recipe():
    assert set(DATASETS) == set(DATA_NAMES) == set(RECIPES)


def test_digits_are_split_by_class_and_the_same_each_time():
    first, second = load("digits", None), load("digits", None)
    assert first.train_images.shape[1:] == (8, 8)
    assert len(first.train_labels) + len(first.test_labels) == 1797
    assert 0.0 <= first.train_images.min() < first.train_images.max() <= 1.0
    counts = np.bincount(first.test_labels) / np.bincount(np.r_[first.test_labels, first.train_labels])
    assert np.all(np.abs(counts - 0.25) < 0.01)
    np.testing.assert_array_equal(first.test_images, second.test_images)


def test_digits_take_no_folder(tmp_path):
    with pytest.raises(LocalError, match="--data-dir"):
        load("digits", tmp_path)


def test_fashion_mnist_is_read_from_a_folder(fashion):
    data = load("fashion-mnist", fashion)
    assert data.train_images.shape == (6, 28, 28)
    assert data.test_images.dtype == np.float32
    assert data.test_labels.dtype == np.int64
    assert data.train_images.max() <= 1.0


def test_a_missing_file_names_package_and_option(fashion):
    (fashion / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(LocalError) as caught:
        load("fashion-mnist", fashion)
    for word in ("t10k-labels-idx1-ubyte", "apt install dataset-fashion-mnist", "--data-dir"):
        assert word in str(caught.value)


def test_a_file_in_anothers_place_is_named(fashion):
    (fashion / "train-images-idx3-ubyte").write_bytes((fashion / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(LocalError, match="1 dimensions where 3 are expected"):
        load("fashion-mnist", fashion)


def test_images_and_labels_must_match(fashion):
    write_idx(fashion / "train-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(LocalError, match="6 train images and 5 labels"):
        load("fashion-mnist", fashion)
