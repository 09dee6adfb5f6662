"""Numbers of epochs, as users tell them."""

from __future__ import annotations

import operator

from dblp.errors import ConfigError


def epoch_number(number: object) -> int:
    """``number``, if it is one of an epoch: a whole number from 0 on (numpy's too). Raises ConfigError."""
    try:
        whole = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        whole = -1
    if whole < 0 or isinstance(number, bool):
        raise ConfigError(
            f"epoch({number!r}): a whole number from 0 on is expected, or none for the next epoch"
        )
    return whole
