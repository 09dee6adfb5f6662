"""Carry: gradient that did not arrive is kept by who has it, and added to its next gradient.

Theory of operation. ``Residual`` belongs to one flat gradient (a bucket) of one rank. A round takes what it carries into the
gradient before the first chunk leaves (``begin``), tells it what ended up in no result (``keep``), and closes the account
(``settle``): what is kept is bounded there, and what the bound drops is discarded and reported. So for every element, summed over
the ranks, delivered + carried + discarded == contributed, exactly wherever the sums themselves are exact. What was lost is known
from the receivers' last words alone, never from acknowledgements.

Two kinds of loss are kept: a contribution (or a partial sum of several ranks) that did not reach the next rank of the reduce leg,
by its sender; and a result that some rank missed in the gather leg, by the rank that made it, in the sum before division.
Everything is in float32 (float64 for float64), so that gradients of half types also carry what rounding them took away.

Bounds (``transport.policy.CarryBound``). ``NORM``: pieces of ``PIECE`` elements, about a chunk each, are dropped whole, those
with the least energy first, until the carry's norm is at most ``limit`` times that of the rank's new gradient; a sum of k
ranks weighs a k-th of its norm. Where nothing was carried before and the algorithm has weighed what it sent, the norm of that
part stands for the gradient's: it costs nothing. ``DECAY``: as ``NORM``, but of all that a round lost half is dropped first, so
that what was lost j times in a row weighs 2^-j. ``AGE``: what a round kept is dropped when the ``limit`` rounds after it did not
deliver it. Whole pieces and halves leave every sum exact.

What is infinite or not a number (a gradient that overflowed, as with automatic loss scaling) is discarded at once under every
bound, and a velocity restarts there: it would spoil all rounds to come.

Deep gradient compression (Lin et al., arXiv 1712.01887, sections 3.2 and 3.3): with ``momentum`` m the rank contributes its
velocity u = m u + g instead of g, and the optimiser adds none of its own; with ``masking`` the velocity of what was delivered
restarts at zero. Differences from the paper: what is left behind is what the network lost, not what is small; the carry is
bounded; without loss, masking clears all velocities, so momentum is for networks that lose much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dblp.collectives.keyed import KeyedStore, Layout, Slice
from dblp.collectives.reduction import DType, Op, energy, narrow_bfloat16, widen_bfloat16
from dblp.errors import ConfigError
from dblp.transport.policy import Carry, CarryBound

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

PIECE = 352
"""Elements that are dropped together: the float32 payload of a datagram of 1464 bytes, less six for the alignment."""
_NO_WARNINGS = np.errstate(over="ignore", invalid="ignore")
"""A gradient that overflows is a matter of those who train; numpy would warn of it once more."""
_BY_NORM = (CarryBound.NORM, CarryBound.DECAY)
"""Bounds that compare norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A part of what a rank contributed, by what became of it."""

    elements: int = 0
    """How many elements other than zero."""
    total: float = 0.0
    """Their sum, in float64: what accounts add up to, over ranks and rounds."""
    energy: float = 0.0
    """Sum of squares."""

    def __add__(self, other: Account) -> Account:
        return Account(
            elements=self.elements + other.elements,
            total=self.total + other.total,
            energy=self.energy + other.energy,
        )


NOTHING = Account()


class Residual:
    """What one rank carries of one flat gradient."""

    __slots__ = (
        "_fresh_energy", "_kept", "_layers", "_ranks", "_rounding", "_rule", "_velocity", "_widen",
        "busy", "dtype", "on_discard", "size",
    )  # fmt: skip

    def __init__(
        self,
        size: int,
        dtype: npt.DTypeLike = np.float32,
        *,
        on_discard: Callable[[Array], None] | None = None,
    ) -> None:
        """``size``: elements of the gradient; ``dtype``: float32, or float64 for gradients of that type. ``on_discard`` is told
        what each round discards (``size`` elements). Memory: nothing until something is lost; then one array of the gradient's
        size (one for each round of ``CarryBound.AGE``), one more for velocities. Raises ConfigError for another type."""
        self.size = size
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(
                f"dtype={self.dtype.name}: a carry is held in float32, or in float64 for gradients of float64"
            )
        self.on_discard = on_discard
        self.busy = False
        self._layers: list[Array] = []  # by age, the newest first; one of all ages unless they are told apart
        self._velocity: Array | None = None
        self._rule: Carry | None = None
        self._widen: Callable[[Array], Array] = _same
        self._fresh_energy: float | None = None
        self._rounding: Array | None = None
        self._kept: Array | None = None
        self._ranks: npt.NDArray[np.int32] | None = None

    @property
    def empty(self) -> bool:
        """Nothing is carried."""
        return not self._layers

    @property
    def values(self) -> Array:
        """What is carried, a copy: (size,)."""
        total = self._zeros()
        for layer in self._layers:
            total += layer
        return total

    # --- one round

    def check(self, size: int, kind: DType, op: Op = Op.SUM) -> None:
        """Raise ConfigError unless a round of a gradient of ``size`` elements of ``kind`` may begin."""
        if self.busy:
            raise ConfigError(
                "carry: a round with this residual is still under way; use one residual a bucket"
            )
        if size != self.size:
            raise ConfigError(f"carry: the residual has {self.size} elements, the gradient {size}")
        if kind.kind != "f" or (kind.name == "float64" and self.dtype != np.float64):
            raise ConfigError(
                f"carry: gradients of {kind.name} cannot be held in {self.dtype.name}; "
                "make the residual with dtype='float64' for float64, and none for types that are not floating-point"
            )
        if op not in (Op.SUM, Op.AVG):
            raise ConfigError(
                f"carry with {op.name}: only sums and averages of gradients leave something to carry"
            )

    @_NO_WARNINGS
    def begin(
        self, array: Array, kind: DType, rule: Carry | None, *, weigh: bool = False, contributes: bool = True
    ) -> None:
        """A round begins with the gradient ``array`` (1-D, ``size`` elements, changed in place to what is to be sent).

        ``rule``: what becomes of what the round loses; None: it is discarded. ``weigh``: nobody else takes the energy of what is
        sent, so it is taken here if the rule needs it. ``contributes``: False of a rank that has no gradient, only a carry.
        """
        self.busy = True
        self._rule = rule
        self._widen = widen_bfloat16 if kind.name == "bfloat16" else _same
        self._kept = self._ranks = self._rounding = None
        self._fresh_energy = None
        fresh = self._advance_velocity(array)
        weigh &= rule is not None and rule.bound in _BY_NORM and contributes
        if self.empty and fresh is None:
            if weigh:
                self._fresh_energy = energy(array, kind)
            return
        wide = self._widen(array).astype(self.dtype) if fresh is None else fresh.copy()
        if contributes and (weigh or not self.empty):
            self._fresh_energy = _energy(wide)
        for layer in self._layers:
            wide += layer
        array[...] = narrow_bfloat16(wide) if kind.name == "bfloat16" else wide
        if kind.half:
            wide -= self._widen(array)
            self._rounding = wide

    def keep(self, first: int, values: Array, *, divisor: int = 1, ranks: int = 1) -> None:
        """``values`` (1-D, in the gradient's type) of the elements from ``first`` on are in no result. ``divisor``: they are an
        average over so many ranks; ``ranks``: how many ranks' contributions are in them."""
        if self._kept is None or self._ranks is None:
            self._kept = self._zeros()
            self._ranks = np.zeros(-(-self.size // PIECE), np.int32)
        stop = first + values.size
        part = self._widen(values)
        if divisor != 1:
            part = part.astype(self.dtype) * self.dtype.type(divisor)
        self._kept[first:stop] += part
        pieces = self._ranks[first // PIECE : -(-stop // PIECE)]
        np.maximum(pieces, max(ranks, divisor), out=pieces)

    @_NO_WARNINGS
    def settle(self, energy_sent: float = 0.0) -> tuple[Account, Account]:
        """The round has ended well: (carried, discarded). ``energy_sent``: sum of squares of what the algorithm sent in the
        reduce leg, if it has weighed it; of the average, if this rank contributed nothing."""
        before, self._layers = self._layers, []
        kept, self._kept = self._kept, None
        rounding, self._rounding = self._rounding, None
        self.busy = False
        rule = self._rule
        if rule is not None and self._velocity is not None:
            self._settle_velocity(self._velocity, kept, rule.masking)
        if kept is None and rounding is None:
            return NOTHING, NOTHING
        kept = self._zeros() if kept is None else kept
        lost = kept != 0 if before and rule is not None and rule.bound is CarryBound.AGE else None
        if rule is None:
            return NOTHING, self._discard(kept if rounding is None else kept + rounding)
        half = kept * self.dtype.type(0.5) if rule.bound is CarryBound.DECAY else None  # not of the rounding
        if rounding is not None:
            kept += rounding
        spoiled = self._drop_spoiled(kept, before if half is None else [half])
        reference = energy_sent if self._fresh_energy is None else self._fresh_energy
        if rule.bound is CarryBound.AGE:
            discarded = self._drop_old(kept, before, lost, int(rule.limit))
        else:
            self._layers = [kept]
            discarded = self._drop_half(kept, half)
            if rule.bound in _BY_NORM:
                discarded += self._drop_small(kept, rule.limit**2 * reference)
        carried = _account(self._layers[0] if len(self._layers) == 1 else self.values)
        if not carried.elements:
            self._layers = []
        return carried, spoiled + discarded

    def abandon(self) -> None:
        """The round has failed: what was carried into it is gone with it."""
        self.busy = False
        self._layers = []
        self._kept = self._ranks = self._rounding = None

    # --- bounds

    def _drop_spoiled(self, kept: Array, before: list[Array]) -> Account:
        """Drop what is not finite, with its older parts; in place."""
        spoiled = ~np.isfinite(kept)
        if not spoiled.any():
            return NOTHING
        dropped = np.where(spoiled, kept, self.dtype.type(0))
        for array in (kept, *before):
            array[spoiled] = 0
        return self._discard(dropped)

    def _drop_old(self, kept: Array, before: list[Array], lost: Bools | None, limit: int) -> Account:
        """Let what was not delivered grow a round older, and drop what is too old then."""
        if lost is None:
            self._layers = [kept]
            return NOTHING
        for layer in before:
            layer *= lost
            kept -= layer
        self._layers = [kept, *before[: limit - 1]]
        return self._discard(before[limit - 1]) if len(before) >= limit else NOTHING

    def _drop_half(self, kept: Array, half: Array | None) -> Account:
        """Take ``half`` from ``kept``, in place."""
        if half is None:
            return NOTHING
        kept -= half
        return self._discard(half)

    def _drop_small(self, kept: Array, most: float) -> Account:
        """Drop pieces of ``kept``, the least energy first, until its energy is at most ``most``; in place."""
        energies = _piece_energies(kept)
        if self._ranks is not None:
            energies /= np.square(np.maximum(self._ranks, 1), dtype=np.float64)
        if energies.sum() <= most:
            return NOTHING
        order = np.argsort(energies, kind="stable")
        # From the largest down, as many as fit: their running sums are exact enough to compare, none is subtracted.
        fit = int(np.searchsorted(np.cumsum(energies[order[::-1]]), most, side="right"))
        drop = np.zeros(len(energies), np.bool_)
        drop[order[: len(order) - fit]] = True
        mask = np.repeat(drop, PIECE)[: self.size]
        dropped = np.where(mask, kept, self.dtype.type(0))
        kept[mask] = 0
        return self._discard(dropped)

    def _discard(self, values: Array) -> Account:
        if self.on_discard is not None:
            self.on_discard(values)
        return _account(values)

    # --- helpers

    def _advance_velocity(self, array: Array) -> Array | None:
        """With momentum: the new velocity, which stands for the gradient."""
        rule = self._rule
        if rule is None or not rule.momentum:
            return None
        gradient = self._widen(array).astype(self.dtype)
        if self._velocity is None:
            self._velocity = gradient
        else:
            self._velocity *= self.dtype.type(rule.momentum)
            self._velocity += gradient
        return self._velocity

    def _settle_velocity(self, velocity: Array, kept: Array | None, masking: bool) -> None:
        """Restart what was delivered, if it is masked, and what is not finite."""
        if masking and kept is None:
            self._velocity = None
            return
        restarts = ~np.isfinite(velocity)
        if masking:
            restarts |= kept == 0
        velocity[restarts] = 0

    def _zeros(self) -> Array:
        return np.zeros(self.size, self.dtype)

    # --- moving what is carried

    def take(self, low: int, high: int) -> Slice:
        """A copy of the state of the elements low..high."""
        if self.busy:
            raise ConfigError("carry: a round with this residual is still under way; wait for it first")
        velocity = None if self._velocity is None else self._velocity[low:high].copy()
        return Slice([layer[low:high].copy() for layer in self._layers], velocity)

    def put(self, low: int, part: Slice) -> None:
        """Take over the state of the elements from ``low`` on, converted to this residual's type."""
        for age, values in enumerate(part.layers):
            if not values.any():
                continue
            while len(self._layers) <= age:
                self._layers.append(self._zeros())
            self._layers[age][low : low + values.size] = values
        if part.velocity is not None:
            if self._velocity is None:
                self._velocity = self._zeros()
            self._velocity[low : low + part.velocity.size] = part.velocity


class CarryStore(KeyedStore[Residual]):
    """The residuals of a model by the names of its parameters."""

    what = "carry"

    def _make(self, size: int, dtype: np.dtype[Any]) -> Residual:
        return Residual(size, dtype)

    def residual(self, layout: Layout, dtype: npt.DTypeLike = np.float32) -> Residual:
        """``KeyedStore.of``."""
        return self.of(layout, dtype)


def _same(values: Array) -> Array:
    return values


def _energy(values: Array) -> float:
    return float(_piece_energies(values).sum())


def _piece_energies(values: Array) -> npt.NDArray[np.float64]:
    """Sum of squares of each piece, the last one perhaps short; float64."""
    whole = values.size // PIECE * PIECE
    pieces = values[:whole].reshape(-1, PIECE)
    energies = np.empty(-(-values.size // PIECE), np.float64)
    energies[: len(pieces)] = np.einsum("ij,ij->i", pieces, pieces)
    if whole < values.size:
        energies[-1] = np.einsum("i,i->", values[whole:], values[whole:])
    return energies


def _account(values: Array) -> Account:
    return Account(
        elements=int(np.count_nonzero(values)),
        total=float(values.sum(dtype=np.float64)),
        energy=_energy(values),
    )
