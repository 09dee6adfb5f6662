"""Congestion control: how much may be in flight on a path, one algorithm a file, picked by name."""

from __future__ import annotations

from collections.abc import Callable

from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.transport.congestion.base import CongestionControl
from dblp.transport.congestion.delay import DelayControl
from dblp.transport.congestion.fixed import FixedControl

REGISTRY: dict[str, Callable[[TransportConfig], CongestionControl]] = {
    "delay": DelayControl,
    "fixed": FixedControl,
}


def make_congestion_control(config: TransportConfig) -> CongestionControl:
    """The controller that ``config.congestion`` names, one for each path to each peer."""
    try:
        factory = REGISTRY[config.congestion]
    except KeyError:
        raise ConfigError(
            f"congestion={config.congestion!r}: known are {', '.join(sorted(REGISTRY))}"
        ) from None
    return factory(config)


__all__ = ["REGISTRY", "CongestionControl", "DelayControl", "FixedControl", "make_congestion_control"]
