"""A text that every Python installation has, as characters: the standard library's own sources.

The vocabulary is fixed: newline and the 95 printable characters of ASCII, and one entry for all others. A sample is a window of
``CONTEXT`` characters; its targets are the same window one character later. Windows do not overlap. The sources differ from one
version of Python to the next, so figures of different versions do not compare.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.errors import LocalError

CONTEXT = 64
"""Characters in a window."""
OTHER = 0
"""The vocabulary's entry for characters that it lacks."""
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The others: entry i is ``CHARACTERS[i - 1]``."""
VOCABULARY = len(CHARACTERS) + 1
_TRAIN_CHARACTERS = 1_000_000
_TEST_CHARACTERS = 100_000
_TEST_FILES = 10
"""One file in so many is for the test."""

Characters = npt.NDArray[np.uint8]
_TABLE = np.full(256, OTHER, np.uint8)
_TABLE[list(CHARACTERS.encode())] = np.arange(1, VOCABULARY)


def read_text(folder: Path | None) -> tuple[Characters, Characters]:
    """Characters to train on and to test on; ``folder``: other ``*.py`` files than the standard library's.

    Whole files go to one side or the other by a checksum of their names, and stand in its order, so a new file moves no other.
    Raises LocalError if there are no sources or too few.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = sorted(folder.glob("*.py"), key=lambda file: (_checksum(file), file.name))
    test = [file for file in files if _checksum(file) % _TEST_FILES == 0]
    train = [file for file in files if _checksum(file) % _TEST_FILES]
    return _read(folder, train, _TRAIN_CHARACTERS), _read(folder, test, _TEST_CHARACTERS)


def windows(text: Characters) -> tuple[Characters, Characters]:
    """Inputs and targets (n, CONTEXT), as views of the text."""
    count = (len(text) - 1) // CONTEXT
    inputs, targets = (text[shift : shift + count * CONTEXT].reshape(count, CONTEXT) for shift in (0, 1))
    return inputs, targets


def encode(content: bytes) -> Characters:
    """Bytes as entries of the vocabulary (n,)."""
    encoded: Characters = _TABLE[np.frombuffer(content, np.uint8)]
    return encoded


def decode(characters: npt.NDArray[Any]) -> str:
    """Entries of the vocabulary (n,) as text; a question mark for what it lacks."""
    return "".join("?" if index == OTHER else CHARACTERS[index - 1] for index in characters)


def _checksum(file: Path) -> int:
    return zlib.crc32(file.name.encode())


def _read(folder: Path, files: list[Path], limit: int) -> Characters:
    """The first ``limit`` characters of the files, one after the other."""
    parts: list[bytes] = []
    wanted = limit
    for file in files:
        if wanted <= 0:
            break
        try:
            parts.append(file.read_bytes()[:wanted])
        except OSError as error:
            raise LocalError(f"{file}: cannot be read: {error.strerror}") from None
        wanted -= len(parts[-1])
    text = encode(b"".join(parts))
    if len(text) <= CONTEXT:
        raise LocalError(
            f"{folder}: {len(files)} *.py files with {len(text)} characters, too little text for a part of the split;"
            " name a folder of many Python sources with --data-dir FOLDER"
        )
    return text
