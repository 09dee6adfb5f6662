"""What torch calls to make a dblp group, and what it refuses."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from dblp.collectives.torch.backend import NAME, DblpProcessGroup
from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig


def create(options: Any, pg_options: Any = None) -> DblpProcessGroup:
    """What torch calls to make a group (``extended_api``). ``pg_options`` may be a TransportConfig.

    Raises ConfigError for a backend string that mixes dblp with another backend.
    """
    _refuse_mixed()
    if pg_options is not None and not isinstance(pg_options, TransportConfig):
        raise ConfigError(
            f"pg_options={pg_options!r}: the dblp backend takes a dblp.TransportConfig, or None"
        )
    config, timeout = pg_options, options.timeout
    if config is None:
        config = TransportConfig.from_env()
        if timeout == default_pg_timeout and os.environ.get("DBLP_TIMEOUT_S"):
            timeout = timedelta(seconds=config.timeout_s)  # nobody chose torch's half hour
    return DblpProcessGroup(
        options.store, options.group_rank, options.group_size, timeout, options.group_id, config
    )


def _refuse_mixed() -> None:
    # torch would take this group for every device, whatever the string says of the others, and tells the
    # creator nothing of it: only the caller's own variable does.
    frame = sys._getframe(1)
    for _ in range(4):
        if frame is None or frame.f_code.co_name == "_new_process_group_helper":
            break
        frame = frame.f_back  # type: ignore[assignment]
    backends = str(frame.f_locals.get("backend_config", "")) if frame is not None else ""
    names = {part.rpartition(":")[2] for part in backends.split(",") if part}
    if names - {NAME}:
        raise ConfigError(
            f"backend {backends!r} mixes dblp with another backend, which torch cannot do for a group in "
            "Python; "
            "use backend='dblp' for this group and make another group for the other devices"
        )
