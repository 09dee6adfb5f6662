"""Collectives in torch's profilers: each call is an event ``dblp:<call>``, from the call to its end.

The names are those of torch's own backends with ``dblp`` in front (``dblp:all_reduce``), the shapes those of the inputs, so
tools that sum up communication find them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch.autograd import (  # type: ignore[attr-defined]  # not in the stubs
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from dblp.collectives.torch.work import DblpWork, completer

P = ParamSpec("P")


def traced(call: str, inputs: int | None = None) -> Callable[[Callable[P, DblpWork]], Callable[P, DblpWork]]:
    """Decorator of a method that starts a collective; ``inputs`` is the position of the argument with its input tensors,
    self not counted. Costs a third of a microsecond while no profiler runs."""

    def decorate(method: Callable[P, DblpWork]) -> Callable[P, DblpWork]:
        @wraps(method)
        def started(*args: P.args, **kwargs: P.kwargs) -> DblpWork:
            if not _profiler_enabled():
                return method(*args, **kwargs)
            shown = () if inputs is None or len(args) <= inputs + 1 else _tensors(args[inputs + 1])
            event = _record_function_with_args_enter(f"dblp:{call}", *shown)
            try:
                work = method(*args, **kwargs)
            except BaseException:
                _record_function_with_args_exit(event)
                raise
            _end_with(work, event)
            return work

        return started

    return decorate


def _end_with(work: DblpWork, event: Any) -> None:
    """End the event when the work ends."""
    if work.before_end(lambda: _record_function_with_args_exit(event)):
        return
    # It has ended already. torch takes an event that ends on the thread that began it for a call that blocked.
    ended = threading.Event()

    def end() -> None:
        _record_function_with_args_exit(event)
        ended.set()

    completer.submit(end)
    ended.wait(1.0)  # it is not run at all while the interpreter exits


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
