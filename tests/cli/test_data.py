"""Data sets: shapes, ranges, the split, and what is said when files are missing."""

import numpy as np
import pytest

from dblp.cli.train.data import DATASETS, load
from dblp.cli.train.recipes import (
    DATA_NAMES,
    MODEL_NAMES,
    OPTIMIZERS,
    RECIPES,
    default_data,
    default_model,
    recipe_of,
)
from dblp.cli.train.text import CHARACTERS, CONTEXT, OTHER, VOCABULARY, decode, encode, read_text, windows
from dblp.errors import ConfigError, LocalError


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
    assert set(DATASETS) == set(DATA_NAMES) == {data for data, _ in RECIPES}
    assert {model for _, model in RECIPES} == set(MODEL_NAMES)
    for recipe in RECIPES.values():
        assert set(recipe.lr) == set(OPTIMIZERS)
        assert recipe.optimizer in OPTIMIZERS


def test_what_is_not_named_goes_with_what_is():
    for model in MODEL_NAMES:
        recipe_of(default_data(model), model)
    for data in DATA_NAMES:
        recipe_of(data, default_model(data))


def test_a_model_that_cannot_read_the_data_is_refused_with_those_that_can():
    with pytest.raises(ConfigError, match="models for text: transformer"):
        recipe_of("text", "mlp")


def test_digits_are_split_by_class_and_the_same_each_time():
    first, second = load("digits", None), load("digits", None)
    assert first.train_inputs.shape[1:] == (8, 8)
    assert len(first.train_targets) + len(first.test_targets) == 1797
    assert 0.0 <= first.train_inputs.min() < first.train_inputs.max() <= 1.0
    counts = np.bincount(first.test_targets) / np.bincount(np.r_[first.test_targets, first.train_targets])
    assert np.all(np.abs(counts - 0.25) < 0.01)
    np.testing.assert_array_equal(first.test_inputs, second.test_inputs)


def test_digits_take_no_folder(tmp_path):
    with pytest.raises(LocalError, match="--data-dir"):
        load("digits", tmp_path)


def test_fashion_mnist_is_read_from_a_folder(fashion):
    data = load("fashion-mnist", fashion)
    assert data.train_inputs.shape == (6, 28, 28)
    assert data.test_inputs.dtype == np.float32
    assert data.test_targets.dtype == np.int64
    assert data.train_inputs.max() <= 1.0


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


def test_inputs_and_labels_must_match(fashion):
    write_idx(fashion / "train-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(LocalError, match="6 train images and 5 labels"):
        load("fashion-mnist", fashion)


@pytest.fixture
def sources(tmp_path):
    """A folder of a hundred short sources."""
    for index in range(100):
        (tmp_path / f"module{index}.py").write_text(f"# module {index}\n" + "x = 1\n" * 20)
    return tmp_path


def test_text_is_the_standard_library_and_the_same_each_time():
    train, test = read_text(None)
    again, _ = read_text(None)
    assert (len(train), len(test)) == (1_000_000, 100_000)
    np.testing.assert_array_equal(train, again)
    assert "def " in decode(train[:10_000])
    assert train.max() < VOCABULARY


def test_no_source_is_on_both_sides(sources):
    train, test = (decode(text) for text in read_text(sources))
    names = [{line for line in text.splitlines() if line.startswith("#")} for text in (train, test)]
    assert len(names[0]) + len(names[1]) == 100
    assert not names[0] & names[1]
    assert 3 <= len(names[1]) <= 20


def test_a_new_source_moves_no_other(sources):
    before = [decode(text) for text in read_text(sources)]
    (sources / "new.py").write_text("# new\n")
    after = [decode(text) for text in read_text(sources)]
    assert [text.replace("# new\n", "") for text in after] == before
    assert after != before


def test_characters_beyond_ascii_are_one_entry():
    encoded = encode("a\té\n~".encode())
    assert encoded.tolist() == [1 + CHARACTERS.index("a"), OTHER, OTHER, OTHER, 1, VOCABULARY - 1]
    assert decode(encoded) == "a???\n~"


def test_targets_are_the_next_characters():
    text = np.arange(3 * CONTEXT, dtype=np.uint8)
    inputs, targets = windows(text)
    assert inputs.shape == targets.shape == (2, CONTEXT)
    np.testing.assert_array_equal(targets, inputs + 1)


def test_too_little_text_is_named_with_its_folder(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n" * 100)
    with pytest.raises(LocalError, match="--data-dir FOLDER") as caught:
        read_text(tmp_path)
    assert str(tmp_path) in str(caught.value)
