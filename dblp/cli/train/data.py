"""Data sets by name, with a fixed training and test split.

Images are float32 (n, height, width) in [0, 1], and their labels int64 (n,); text is windows of characters, uint8 (n, context),
each with the next character, uint8 (n, context).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.cli.extras import require
from dblp.cli.train.idx import read_idx
from dblp.cli.train.text import VOCABULARY, read_text, windows
from dblp.errors import LocalError

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
_TEST_SHARE = 0.25
_SPLIT_SEED = 20_260_101
"""The test set of digits is the same in every run, whatever the seed of the training."""

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set, split: what is to be told from the inputs is the targets, each one of ``classes``."""

    train_inputs: npt.NDArray[Any]
    train_targets: npt.NDArray[Any]
    test_inputs: npt.NDArray[Any]
    test_targets: npt.NDArray[Any]
    classes: int = 10


def load(name: str, folder: Path | None) -> Dataset:
    """Load a data set of ``DATASETS``; ``folder`` holds its files. Raises LocalError with the remedy."""
    return DATASETS[name](folder)


def _load_digits(folder: Path | None) -> Dataset:
    """scikit-learn's digits: 1797 images of 8 x 8, in the package; three quarters train, stratified."""
    if folder is not None:
        raise LocalError("--data-dir: digits come with scikit-learn; drop it, or use --data fashion-mnist")
    require("sklearn")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    test = _stratified_test_mask(labels)
    return Dataset(
        train_inputs=images[~test],
        train_targets=labels[~test],
        test_inputs=images[test],
        test_targets=labels[test],
    )


def _stratified_test_mask(labels: Labels) -> npt.NDArray[np.bool_]:
    """True for the test set: the same share of each class, drawn with a fixed seed."""
    rng = np.random.default_rng(_SPLIT_SEED)
    mask = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        mask[members[: round(len(members) * _TEST_SHARE)]] = True
    return mask


def _load_fashion_mnist(folder: Path | None) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017): 60,000 and 10,000 images of 28 x 28."""
    folder = FASHION_MNIST_FOLDER if folder is None else folder

    def images(part: str) -> Images:
        return (_idx(folder, f"{part}-images-idx3-ubyte", 3) / 255.0).astype(np.float32)

    def labels(part: str) -> Labels:
        return _idx(folder, f"{part}-labels-idx1-ubyte", 1).astype(np.int64)

    data = Dataset(
        train_inputs=images("train"),
        train_targets=labels("train"),
        test_inputs=images("t10k"),
        test_targets=labels("t10k"),
    )
    for part, left, right in (
        ("train", data.train_inputs, data.train_targets),
        ("t10k", data.test_inputs, data.test_targets),
    ):
        if len(left) != len(right):
            raise LocalError(
                f"{folder}: {len(left)} {part} images and {len(right)} labels; download the files anew"
            )
    return data


def _idx(folder: Path, name: str, rank: int) -> npt.NDArray[Any]:
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise LocalError(
            f"{folder / name}[.gz]: no such file; install Debian's package (apt install"
            " dataset-fashion-mnist) or name the folder that holds the files with --data-dir FOLDER"
        )
    array = read_idx(path)
    if array.ndim != rank:
        raise LocalError(f"{path}: {array.ndim} dimensions where {rank} are expected; is it the right file?")
    return array


def _load_text(folder: Path | None) -> Dataset:
    """The standard library's sources: next characters of windows of 64 characters."""
    train, test = (windows(text) for text in read_text(folder))
    return Dataset(
        train_inputs=train[0],
        train_targets=train[1],
        test_inputs=test[0],
        test_targets=test[1],
        classes=VOCABULARY,
    )


DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "digits": _load_digits,
    "fashion-mnist": _load_fashion_mnist,
    "text": _load_text,
}
