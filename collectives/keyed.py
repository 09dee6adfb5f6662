"""What is kept for each parameter of a model, by its name: it survives buckets that are made anew, changes of type, and
checkpoints.

What a rank holds of a bucket (``Held``: a carry, the memory of a compression) is one flat array or a few of them. A store finds
it by the bucket's layout, cuts it up by parameter when a bucket is made anew or saved, and puts it together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dblp.errors import ConfigError

Array = npt.NDArray[Any]
Layout = Sequence[tuple[str, int]]
"""Names of parameters and their numbers of elements, in the order in which a bucket holds them."""
STATE_VERSION = 1
"""Of ``KeyedStore.state_dict``."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The state of one parameter's elements."""

    layers: list[Array]
    """What is held back, by age, the newest first: one array, unless ages are told apart."""
    velocity: Array | None
    """DGC's u, if there is momentum."""

    @property
    def size(self) -> int:
        """Elements; 0 if nothing is held."""
        return max([values.size for values in self._all], default=0)

    @property
    def _all(self) -> list[Array]:
        return [*self.layers, *([] if self.velocity is None else [self.velocity])]


class Held(Protocol):
    """What is held of one bucket."""

    def take(self, low: int, high: int) -> Slice:
        """A copy of the state of the elements low..high. Raises ConfigError while a round of the bucket is under way."""

    def put(self, low: int, part: Slice) -> None:
        """Take over the state of the elements from ``low`` on."""


H = TypeVar("H", bound=Held)


class KeyedStore(Generic[H]):
    """What is held of a model's buckets, by the names of its parameters."""

    what: ClassVar[str]
    """What is held, for errors."""

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[tuple[str, int], ...], str], H] = {}
        self._homes: dict[str, tuple[H, int, int]] = {}
        self._waiting: dict[str, Slice] = {}

    def of(self, layout: Layout, dtype: npt.DTypeLike = np.float32) -> H:
        """What is held of a bucket. ``layout``: its parameters, in the order in which the bucket holds them; ``dtype``: float32,
        or float64 for gradients of that type. A parameter is in one bucket at a time: what an older bucket held for it moves.

        Raises ConfigError if a name stands twice in the layout, if the size of a parameter has changed, or if a round of an
        older bucket is still under way.
        """
        key = tuple((str(name), int(size)) for name, size in layout), np.dtype(dtype).name
        known = self._held.get(key)
        if known is None:
            known = self._held[key] = self._assemble(key[0], np.dtype(dtype))
        return known

    def state_dict(self) -> dict[str, Any]:
        """What is held, by parameter: numpy arrays and plain values, for a checkpoint of this rank (each rank has its own); take
        it between rounds."""
        slices = dict(self._waiting)
        for name, (held, low, high) in self._homes.items():
            slices[name] = held.take(low, high)
        entries = {
            name: {"layers": part.layers, "velocity": part.velocity}
            for name, part in slices.items()
            if part.size
        }
        return {"version": STATE_VERSION, "parameters": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, whatever the buckets were; what was held before is forgotten. Raises ConfigError if
        it is not usable."""
        try:
            if state["version"] != STATE_VERSION:
                raise ConfigError(
                    f"{self.what}: a state of version {state['version']!r}; this version reads {STATE_VERSION}"
                )
            waiting = {
                str(name): Slice(
                    [_floats(values) for values in entry["layers"]],
                    None if entry["velocity"] is None else _floats(entry["velocity"]),
                )
                for name, entry in state["parameters"].items()
            }
        except ConfigError:
            raise  # it says by itself what is wrong
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"this is no state of a {type(self).__name__}: {error!r}") from None
        self._held.clear()
        self._homes.clear()
        self._waiting = waiting

    def _make(self, size: int, dtype: np.dtype[Any]) -> H:
        """An empty one for a bucket of ``size`` elements."""
        raise NotImplementedError

    def _assemble(self, layout: tuple[tuple[str, int], ...], dtype: np.dtype[Any]) -> H:
        names = [name for name, _ in layout]
        if len(set(names)) != len(names):
            raise ConfigError(f"{self.what}: a parameter stands twice in the layout {names}")
        parts = {name: self._find(name) for name in names}
        for name, size in layout:
            if parts[name].size not in (0, size):
                raise ConfigError(
                    f"{self.what}: parameter {name!r} has {size} elements, {parts[name].size} are held; "
                    "load a state of the same model"
                )
        held = self._make(sum(size for _, size in layout), dtype)
        low = 0
        for name, size in layout:
            held.put(low, parts[name])
            self._waiting.pop(name, None)
            self._homes[name] = held, low, low + size
            low += size
        homes = {id(home) for home, _, _ in self._homes.values()}
        self._held = {key: held for key, held in self._held.items() if id(held) in homes}
        return held

    def _find(self, name: str) -> Slice:
        """What is held for a parameter, where it is now."""
        if name in self._homes:
            held, low, high = self._homes[name]
            return held.take(low, high)
        return self._waiting.get(name, Slice([], None))


def _floats(values: Any) -> Array:
    array = np.array(values)
    if array.ndim != 1 or array.dtype not in (np.float32, np.float64):
        raise ValueError(f"an array of shape {array.shape} and type {array.dtype.name}")
    return array
