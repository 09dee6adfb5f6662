"""Packages that only some commands need: checked before the work starts, named with the pip line."""

from __future__ import annotations

from importlib.util import find_spec

from dblp.errors import LocalError
from dblp.installed import pip_line

_EXTRAS = {
    "torch": ("torch", "torch"),
    "numba": ("numba", "sim"),
    "sklearn": ("scikit-learn", "train"),
    "matplotlib": ("matplotlib", "train"),
    "scapy": ("scapy", "lab"),
    "pyroute2": ("pyroute2", "lab"),
    "ray": ("ray", "ray"),
}


def require(*modules: str) -> None:
    """Raise LocalError that names each missing package and the pip line, if a module cannot be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return
    packages = " and ".join(_EXTRAS[module][0] for module in missing)
    extras = (_EXTRAS[module][1] for module in missing)
    raise LocalError(f"this command needs {packages}; install with: {pip_line(*extras)}")
