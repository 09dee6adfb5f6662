"""Options that hold lists: parsed into types once, refused with the option's name and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dblp.errors import ConfigError
from dblp.units import parse_bytes, parse_seconds

T = TypeVar("T")
OLD_NAMES = {"png": "picture", "figure": "picture", "plot": "picture", "html": "report"}
"""Names that options had, which commands still take without showing them, and the one name that all commands have now."""
MOST_SEEDS = 100_000
"""Of one command: each is a run, or more."""
LARGEST_SEED = 2**32 - 1
"""What every generator of random numbers takes."""


def parse_list(option: str, text: str, read: Callable[[str], T], what: str) -> list[T]:
    """Read ``"2,4"`` with ``read`` for each item; raises ConfigError for a bad or repeated item."""
    values: list[T] = []
    for item in (part.strip() for part in text.split(",")):
        try:
            value = read(item)
        except ValueError:
            raise ConfigError(f"{option} {text!r}: {item!r} is not {what}") from None
        if value in values:
            raise ConfigError(f"{option} {text!r}: {item!r} stands twice")
        values.append(value)
    return values


def parse_choices(
    option: str, text: str, known: Sequence[str], plain: Callable[[str], str] = str
) -> list[str]:
    """Read a list of names out of ``known``; the order is the user's. ``plain`` gives the name of what has others."""

    def read(item: str) -> str:
        item = plain(item)
        if item not in known:
            raise ValueError(item)
        return item

    return parse_list(option, text, read, f"one of {', '.join(known)}")


def parse_choice(option: str, text: str, known: Sequence[str]) -> str:
    """Read one name out of ``known``; raises ConfigError."""
    if text not in known:
        raise ConfigError(f"{option} {text!r}: known are {', '.join(known)}")
    return text


def parse_ranks(text: str) -> list[int]:
    """Read world sizes: ``"2,4"``; each at least 2, since one rank has nobody to reduce with."""
    return parse_list("--ranks", text, _at_least(2), "a number of ranks, 2 or more")


def parse_sizes(text: str) -> list[int]:
    """Read message sizes in bytes: ``"4K,1M"``; each at least 4, one float32."""
    return parse_list("--sizes", text, _size, _SIZE)


def parse_size(option: str, text: str) -> int:
    """Read one size in bytes; raises ConfigError."""
    try:
        return _size(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: not {_SIZE}") from None


def parse_time(option: str, text: str) -> float:
    """Read a time in seconds: ``"20s"``, ``"1min"``, or a bare number of seconds; raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def parse_seeds(text: str) -> list[int]:
    """Read seeds: ``"3"`` is how many (0, 1, 2); with a comma, the seeds themselves: ``"7,"``, ``"1,5"``."""
    what = "a number of seeds (3) or the seeds themselves (0,1,5)"
    if "," not in text:
        count = parse_list("--seeds", text, _at_least(1), what)[0]
        if count > MOST_SEEDS:
            raise ConfigError(f"--seeds {text!r}: {MOST_SEEDS} at most; a seed itself has a comma: '{text},'")
        return list(range(count))
    seeds = parse_list("--seeds", text.removesuffix(","), _at_least(0), what)
    if max(seeds) > LARGEST_SEED:
        raise ConfigError(f"--seeds {text!r}: {max(seeds)} is too large; the largest seed is {LARGEST_SEED}")
    return seeds


_SIZE = "a size of 4 bytes or more, such as 4K or 25M"


def _size(item: str) -> int:
    size = parse_bytes(item)
    if size < 4:
        raise ValueError(item)
    return size - size % 4


def _at_least(least: int) -> Callable[[str], int]:
    def read(item: str) -> int:
        value = int(item)
        if value < least:
            raise ValueError(item)
        return value

    return read
