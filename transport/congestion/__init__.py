"""Congestion control: how much may be in flight on a path, one algorithm a file, picked by name."""

from __future__ import annotations

from dblp.transport.config import TransportConfig
from dblp.transport.congestion.base import CongestionControl
from dblp.transport.congestion.bbr import BbrControl
from dblp.transport.congestion.dctcp import DctcpControl
from dblp.transport.congestion.delay import DelayControl
from dblp.transport.congestion.fixed import FixedControl

REGISTRY: dict[str, type[DelayControl | BbrControl | DctcpControl | FixedControl]] = {
    "delay": DelayControl,
    "bbr": BbrControl,
    "dctcp": DctcpControl,
    "fixed": FixedControl,
}


def make_congestion_control(config: TransportConfig) -> CongestionControl:
    """The controller that ``config.congestion`` names, one for each path to each peer."""
    return REGISTRY[config.congestion](config)


__all__ = [
    "REGISTRY",
    "BbrControl",
    "CongestionControl",
    "DctcpControl",
    "DelayControl",
    "FixedControl",
    "make_congestion_control",
]
