"""IDX files, the format of MNIST and its relatives, plain or gzipped.

Layout (Y. LeCun, C. Cortes, C. Burges, "The MNIST database", "FILE FORMATS"): two zero bytes, one byte of
element type, one byte with the number of dimensions, then each dimension as a big-endian uint32, then the
elements, row-major.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import LocalError

_GZIP_MAGIC = b"\x1f\x8b"
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> npt.NDArray[Any]:
    """Read an array; raises LocalError that names the file if it is missing, damaged or no IDX file."""
    content = _read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES:
        raise LocalError(
            f"{path}: not an IDX file: it starts with {content[:4].hex(' ') or 'nothing'}; download it anew"
        )
    dtype, rank = np.dtype(_DTYPES[content[2]]), content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise LocalError(f"{path}: cut short within its header ({len(content)} bytes); download it anew")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", rank, 4))
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise LocalError(
            f"{path}: {len(content)} bytes where shape {shape} needs {expected}; download it anew"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LocalError(f"{path}: damaged gzip file ({error}); download it anew") from None
    except OSError as error:
        raise LocalError(f"{path}: cannot be read: {error.strerror}") from None
