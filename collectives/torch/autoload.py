"""The ``torch.backends`` entry point: ``import torch`` calls it, and then knows the backend ``dblp``.

torch is imported inside the function only: at this module's top it would import itself half-way.
"""

from __future__ import annotations


def autoload() -> None:
    """Register the backend ``dblp`` with torch.distributed; does nothing where torch was built without it."""
    import torch.distributed

    if not torch.distributed.is_available() or hasattr(torch.distributed.Backend, "DBLP"):
        return
    torch.distributed.Backend.register_backend("dblp", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: object, pg_options: object = None) -> object:
    # The backend itself (numpy, asyncio, sockets) loads with the first group: ``import torch`` stays as quick
    # as it was.
    from dblp.collectives.torch.creation import create

    return create(options, pg_options)
