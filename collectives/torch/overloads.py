"""torch's overloads of a collective, brought into one form.

torch's own groups also take one tensor in place of a list, and operation, root and timeout in place of the options object. torch
itself calls them so in places (``model.join()`` reduces the bitmap of unused parameters as one tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""Attributes of the options objects, by the arguments that stand for them."""


def overloaded(options: type[Any], lists: int, *names: str) -> Callable[[F], F]:
    """Let ``method(*lists, opts)`` be called in torch's other forms.

    ``options``: the class of ``opts``; ``lists``: how many arguments before it are lists, of tensors or of lists of them, with
    one entry a device; ``names``: what may stand in place of ``opts``, in this order or by name.
    """

    def decorate(method: F) -> F:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors, rest = args[:lists], args[lists:]
            if any(isinstance(argument, torch.Tensor) for argument in tensors):
                tensors = tuple([argument] for argument in tensors)
            if rest and (rest[0] is None or isinstance(rest[0], options)):
                return method(self, *tensors, *rest, **kwargs)
            given = dict(zip(names, rest, strict=False))
            given |= {name: kwargs.pop(name) for name in names if name in kwargs}
            if given:
                kwargs["opts"] = _made(options, given)
            return method(self, *tensors, **kwargs)

        return cast(F, call)

    return decorate


def _made(options: type[Any], given: dict[str, Any]) -> Any:
    made = options()
    for name, value in given.items():
        if value is not None:
            setattr(made, _FIELDS[name], value)
    return made
