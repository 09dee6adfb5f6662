"""What the copy of a model has in place of the attachment.

A DDP model holds its communication hook's state, so whoever copies or pickles the model (``copy.deepcopy``, ``torch.save``,
``AveragedModel``) copies that too: sockets, threads and reports. torch itself leaves the hook of a copy behind, as the new
reducer of a copy has none. So the copy gets a ``Copied``, which does nothing, and trains as a model that was never attached.
"""

from __future__ import annotations

from typing import Any

import torch


class Copied:
    """Stands in a copied or unpickled model where the original has its attachment or compression."""

    def __repr__(self) -> str:
        return "<no attachment: a copy of a model has none>"


class LeftBehind:
    """Base of what a model's copy leaves behind."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Copied], tuple[()]]:
        """For ``copy`` and ``pickle``."""
        return Copied, ()


def hooks_of(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """The communication hooks of a DDP model with their states, those that its original had left out."""
    hooks = getattr(model, "_comm_hooks", ())
    return [(hook, state) for hook, state in hooks if not isinstance(state, Copied)]


def forget_copied(model: torch.nn.Module) -> None:
    """Remove what the original had from a copy, which gets a hook of its own."""
    if getattr(model, "_comm_hooks", ()):
        setattr(model, "_comm_hooks", hooks_of(model))  # noqa: B010  a Module's attributes are tensors to mypy
