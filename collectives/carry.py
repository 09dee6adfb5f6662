"""Carry: gradient that did not arrive is kept by who has it, and added to its next gradient.

Theory of operation. ``Residual`` belongs to one flat gradient (a bucket) of one rank. A round takes what it carries into the
gradient before the first chunk leaves (``begin``), tells it what ended up in no result (``keep``), and closes the account
(``settle``): what is kept is bounded there, and what the bound drops is discarded and reported. So for every element, summed over
the ranks, delivered + carried + discarded == contributed, exactly wherever the sums themselves are exact. What was lost is known
from the receivers' last words alone, never from acknowledgements.

Most of a gradient arrives, so what is carried is held in the pieces of which something was lost (``Pieces``), and a round costs
in proportion to them. What is lost within a round is added up in an array of the gradient's size that is zero elsewhere and
cleared where it was touched. Dense by nature are velocities and the norm of the gradient that a bound compares with.

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
from dblp.collectives.pieces import (
    PIECE,
    Index,
    Pieces,
    gather,
    pack,
    piece_count,
    piece_energies,
    scatter,
    union,
)  # fmt: skip
from dblp.collectives.reduction import DType, Op, energy, narrow_bfloat16, widen_bfloat16
from dblp.errors import ConfigError
from dblp.transport.fields import is_whole
from dblp.transport.policy import Carry, CarryBound

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

_BLOCK = 128 * PIECE
"""Elements that are converted at once where a whole gradient is only looked at: they stay in a processor's cache."""
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of half types that are all set in what is infinite or not a number."""
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
        "_fresh_energy", "_kept", "_layers", "_loose", "_ranks", "_rounding", "_rule", "_velocity", "_widen",
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
        what each round discards (``size`` elements). Memory: nothing until something is lost; then the pieces that are carried
        (those of each round apart under ``CarryBound.AGE``), one array of the gradient's size until a round loses nothing, and
        one for velocities. Raises ConfigError for another type, or for what is no size."""
        if not is_whole(size) or size < 0:
            raise ConfigError(
                f"size={size!r}: the number of the gradient's elements, as in Residual(gradient.size)"
            )
        self.size = int(size)
        try:
            self.dtype: np.dtype[Any] = np.dtype(dtype)
        except TypeError:
            raise ConfigError(f"dtype={dtype!r}: np.float32 or np.float64 is needed") from None
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(
                f"dtype={self.dtype.name}: a carry is held in float32, or in float64 for gradients of float64"
            )
        self.on_discard = on_discard
        self.busy = False
        self._layers: list[Pieces] = []  # by age, the newest first; one of all ages unless told apart
        self._loose: list[Array] = []  # the same on whole arrays, while ``put`` puts them together
        self._velocity: Array | None = None
        self._rule: Carry | None = None
        self._widen: Callable[[Array], Array] = _same
        self._fresh_energy: float | None = None
        self._rounding: Pieces | None = None
        self._kept: Array | None = None  # whole pieces; zeros where _ranks is 0, and everywhere without
        self._ranks: npt.NDArray[np.int32] | None = None  # by piece; 0: nothing was kept there

    @property
    def empty(self) -> bool:
        """Nothing is carried."""
        return not self._layers and not self._loose

    @property
    def values(self) -> Array:
        """What is carried, a copy: (size,)."""
        self._pack()
        return self._sum().dense if self._layers else self._zeros()

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
        self._pack()
        self._clear()
        self._fresh_energy = None
        fresh = self._advance_velocity(array)
        by_norm = contributes and rule is not None and rule.bound in _BY_NORM
        if self.empty and fresh is None:
            if weigh and by_norm:
                self._fresh_energy = energy(array, kind)
            return
        if by_norm and (weigh or not self.empty):
            self._fresh_energy = self._energy(array if fresh is None else fresh)
        self._add_carried(array, kind, fresh)

    def keep(self, first: int, values: Array, *, divisor: int = 1, ranks: int = 1) -> None:
        """``values`` (1-D, in the gradient's type) of the elements from ``first`` on are in no result. ``divisor``: they are an
        average over so many ranks; ``ranks``: how many ranks' contributions are in them."""
        if self._ranks is None:
            self._ranks = np.zeros(piece_count(self.size), np.int32)
        if self._kept is None:
            self._kept = np.zeros(len(self._ranks) * PIECE, self.dtype)
        stop = first + values.size
        pieces = self._ranks[first // PIECE : piece_count(stop)]
        np.maximum(pieces, max(ranks, divisor), out=pieces)
        part = self._widen(values)
        if divisor != 1:
            part = part.astype(self.dtype) * self.dtype.type(divisor)
        self._kept[first:stop] += part

    @_NO_WARNINGS
    def settle(self, energy_sent: float = 0.0) -> tuple[Account, Account]:
        """The round has ended well: (carried, discarded). ``energy_sent``: sum of squares of what the algorithm sent in the
        reduce leg, if it has weighed it; of the average, if this rank contributed nothing."""
        before, self._layers = self._layers, []
        self.busy = False
        rule, rounding = self._rule, self._rounding
        if rule is not None and self._velocity is not None:
            self._settle_velocity(self._velocity, rule.masking)
        if self._ranks is None:
            self._kept = None  # as long as rounds lose, the array is used again
            if rounding is None:
                return NOTHING, NOTHING
        kept, ranks = self._take_kept()
        if rule is None:
            if rounding is not None:
                kept.rows[rounding.places(kept.index)] += rounding.rows
            return NOTHING, self._discard(kept)
        older = [layer.among(kept.index) for layer in before] if rule.bound is CarryBound.AGE else []
        lost = kept.rows != 0 if older else None
        half = kept.rows * self.dtype.type(0.5) if rule.bound is CarryBound.DECAY else None  # no rounding
        if rounding is not None:
            kept.rows[rounding.places(kept.index)] += rounding.rows
        spoiled = self._drop_spoiled(kept, older if half is None else [kept.with_rows(half)])
        reference = energy_sent if self._fresh_energy is None else self._fresh_energy
        if rule.bound is CarryBound.AGE:
            discarded = self._drop_old(kept, older, lost, int(rule.limit))
        else:
            self._layers = [kept]
            discarded = self._drop_half(kept, half)
            if rule.bound in _BY_NORM:
                discarded += self._drop_small(kept, ranks, rule.limit**2 * reference)
        carried = _account(self._sum())
        if not carried.elements:
            self._layers = []
        return carried, spoiled + discarded

    def abandon(self) -> None:
        """The round has failed: what was carried into it is gone with it."""
        self.busy = False
        self._layers, self._loose = [], []
        self._kept = self._ranks = self._rounding = None

    # --- bounds

    def _drop_spoiled(self, kept: Pieces, others: list[Pieces]) -> Account:
        """Drop what is not finite, with its parts in ``others`` (of pieces that ``kept`` has); in place."""
        finite = np.isfinite(kept.rows)
        if finite.all():
            return NOTHING
        spoiled = ~finite
        dropped = np.where(spoiled, kept.rows, self.dtype.type(0))
        for each in (kept, *others):
            each.rows[spoiled[each.places(kept.index)]] = 0
        return self._discard(kept.with_rows(dropped))

    def _drop_old(self, kept: Pieces, older: list[Pieces], lost: Bools | None, limit: int) -> Account:
        """Let what was not delivered (of ``older``, of pieces that ``kept`` has) grow a round older, and drop what is too old."""
        if lost is None:
            self._layers = [kept]
            return NOTHING
        for layer in older:
            places = layer.places(kept.index)
            np.multiply(layer.rows, lost[places], out=layer.rows)
            kept.rows[places] -= layer.rows
        self._layers = [kept, *older[: limit - 1]]
        return self._discard(older[limit - 1]) if len(older) >= limit else NOTHING

    def _drop_half(self, kept: Pieces, half: Array | None) -> Account:
        """Take ``half`` from ``kept``, in place."""
        if half is None:
            return NOTHING
        np.subtract(kept.rows, half, out=kept.rows)
        return self._discard(kept.with_rows(half))

    def _drop_small(self, kept: Pieces, ranks: npt.NDArray[np.int32] | None, most: float) -> Account:
        """Drop pieces of ``kept``, the least energy first, until its energy is at most ``most``. ``ranks``: by piece of the
        gradient, how many ranks' contributions are in it."""
        energies = kept.energies
        if ranks is not None and ranks.max(initial=0) > 1:
            energies /= np.square(np.maximum(ranks[kept.index], 1), dtype=np.float64)
        if kept.spread(energies).sum() <= most:
            return NOTHING
        order = np.argsort(energies, kind="stable")
        # From the largest down, as many as fit: their running sums are exact enough to compare, none is subtracted.
        fit = int(np.searchsorted(np.cumsum(energies[order[::-1]]), most, side="right"))
        drop = np.zeros(len(energies), np.bool_)
        drop[order[: len(order) - fit]] = True
        self._layers = [kept.only(~drop)]
        return self._discard(kept.only(drop))

    def _discard(self, pieces: Pieces) -> Account:
        if self.on_discard is not None:
            self.on_discard(pieces.dense)
        return _account(pieces)

    # --- helpers

    def _add_carried(self, array: Array, kind: DType, fresh: Array | None) -> None:
        """Add what is carried to ``array``, of which ``fresh``, if there is one, takes the place; in place."""
        if not kind.half and fresh is not None:
            array[...] = fresh
        if array.dtype == self.dtype:
            for layer in self._layers:
                layer.add_to(array)
            return
        index = self._inexact(array, kind, fresh)
        wide = gather(fresh, index) if fresh is not None else self._wide(gather(array, index))
        for layer in self._layers:
            wide[layer.places(index)] += layer.rows
        narrow = narrow_bfloat16(wide) if kind.name == "bfloat16" else wide.astype(array.dtype)
        scatter(array, index, narrow)
        if kind.half:
            wide -= self._widen(narrow)
            self._rounding = Pieces(self.size, index, wide).trimmed()

    def _inexact(self, array: Array, kind: DType, fresh: Array | None) -> Index:
        """The pieces that may be other in ``array``'s type than in this residual's."""
        count = piece_count(self.size)
        if kind.half and fresh is not None:
            return np.arange(count)
        index = union([np.empty(0, np.intp), *(layer.index for layer in self._layers)])
        if not kind.half or len(index) == count:
            return index
        return union([index, _overflowed(array, kind)])  # what is infinite has no rest that is a number

    def _take_kept(self) -> tuple[Pieces, npt.NDArray[np.int32] | None]:
        """What the round has kept, in the pieces of which something was kept or rounded, and ``_ranks``; both end here."""
        kept, ranks = self._kept, self._ranks
        indices = [] if ranks is None else [np.flatnonzero(ranks)]
        if self._rounding is not None:
            indices.append(self._rounding.index)
        index = union(indices)
        if kept is None:
            rows = np.zeros((len(index), PIECE), self.dtype)
        elif len(index) * PIECE == kept.size:
            rows, self._kept = kept.reshape(-1, PIECE), None
        else:
            rows = gather(kept, index)
        self._clear()
        return Pieces(self.size, index, rows), ranks

    def _clear(self) -> None:
        """Forget what the round has kept, and what rounding took."""
        if self._kept is not None and self._ranks is not None:
            self._kept.reshape(-1, PIECE)[self._ranks != 0] = 0
        self._ranks = self._rounding = None

    def _sum(self) -> Pieces:
        """The sum of all layers, at least one."""
        if len(self._layers) == 1:
            return self._layers[0]
        index = union([layer.index for layer in self._layers])
        rows = np.zeros((len(index), PIECE), self.dtype)
        for layer in self._layers:
            rows[layer.places(index)] += layer.rows
        return Pieces(self.size, index, rows)

    def _energy(self, array: Array) -> float:
        """Sum of squares of a gradient, by piece."""
        if array.dtype == self.dtype:
            return float(piece_energies(array).sum())
        energies = np.empty(piece_count(self.size), np.float64)
        for low in range(0, self.size, _BLOCK):
            wide = self._wide(array[low : low + _BLOCK])
            energies[low // PIECE : (low + _BLOCK) // PIECE] = piece_energies(wide)
        return float(energies.sum())

    def _wide(self, values: Array) -> Array:
        """In this residual's type."""
        return self._widen(values).astype(self.dtype, copy=False)

    def _advance_velocity(self, array: Array) -> Array | None:
        """With momentum: the new velocity, which stands for the gradient."""
        rule = self._rule
        if rule is None or not rule.momentum:
            return None
        gradient = self._widen(array)
        if self._velocity is None:
            self._velocity = gradient.astype(self.dtype)
        else:
            self._velocity *= self.dtype.type(rule.momentum)
            self._velocity += gradient
        return self._velocity

    def _settle_velocity(self, velocity: Array, masking: bool) -> None:
        """Restart what was delivered, if it is masked, and what is not finite."""
        kept = None if self._ranks is None else self._kept
        if masking and kept is None:
            self._velocity = None
            return
        restarts = ~np.isfinite(velocity)
        if masking and kept is not None:
            restarts |= kept[: self.size] == 0
        velocity[restarts] = 0

    def _zeros(self) -> Array:
        return np.zeros(self.size, self.dtype)

    # --- moving what is carried

    def take(self, low: int, high: int) -> Slice:
        """A copy of the state of the elements low..high."""
        if self.busy:
            raise ConfigError("carry: a round with this residual is still under way; wait for it first")
        self._pack()
        velocity = None if self._velocity is None else self._velocity[low:high].copy()
        return Slice([layer.part(low, high) for layer in self._layers], velocity)

    def put(self, low: int, part: Slice) -> None:
        """Take over the state of the elements from ``low`` on, converted to this residual's type."""
        for age, values in enumerate(part.layers):
            if not values.any():
                continue
            if self._layers:
                self._loose, self._layers = [layer.dense for layer in self._layers], []
            while len(self._loose) <= age:
                self._loose.append(self._zeros())
            self._loose[age][low : low + values.size] = values
        if part.velocity is not None:
            if self._velocity is None:
                self._velocity = self._zeros()
            self._velocity[low : low + part.velocity.size] = part.velocity

    def _pack(self) -> None:
        """What was put together is held in pieces from here on."""
        if self._loose:
            self._layers, self._loose = [pack(array) for array in self._loose], []


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


def _overflowed(array: Array, kind: DType) -> Index:
    """The pieces of a half type's array in which something is infinite or not a number."""
    bits, exponent = array.view(np.uint16), np.uint16(_EXPONENT[kind.name])
    found: list[Index] = [np.empty(0, np.intp)]
    for low in range(0, array.size, _BLOCK):
        exponents = bits[low : low + _BLOCK] & exponent
        if exponents.max() == exponent:
            found.append((low + np.flatnonzero(exponents == exponent)) // PIECE)
    return union(found)


def _account(pieces: Pieces) -> Account:
    return Account(
        elements=int(np.count_nonzero(pieces.rows != 0)),  # quicker than of floats
        total=float(pieces.rows.sum(dtype=np.float64)),
        energy=float(pieces.spread(pieces.energies).sum()),
    )
