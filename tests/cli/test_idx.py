"""IDX files: read whole, or refused with the file's name."""

import gzip

import numpy as np
import pytest

from dblp.cli.train.idx import read_idx
from dblp.errors import LocalError

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def encode(array):
    code = next(code for name, code in CODES.items() if np.dtype(name) == array.dtype)
    head = bytes([0, 0, code, array.ndim])
    return head + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_arrays_of_every_type_come_back(tmp_path, dtype, pack):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    path = tmp_path / "data"
    path.write_bytes(pack(encode(array)))
    back = read_idx(path)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_an_empty_array_is_an_array(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(encode(np.zeros((0, 28, 28), "u1")))
    assert read_idx(path).shape == (0, 28, 28)


WHOLE = encode(np.arange(12, dtype="u1").reshape(3, 4))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an IDX file"),
        (b"PK\x03\x04" + WHOLE, "not an IDX file"),
        (b"\0\0\x0a\x01" + WHOLE[4:], "not an IDX file"),
        (WHOLE[:7], "cut short within its header"),
        (WHOLE[:-1], "needs 24"),
        (WHOLE + b"\0", "needs 24"),
        (gzip.compress(WHOLE, mtime=0)[:-9], "damaged gzip"),
        (b"\x1f\x8b" + WHOLE, "damaged gzip"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, words):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(LocalError) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LocalError, match="nothing-here"):
        read_idx(tmp_path / "nothing-here")
