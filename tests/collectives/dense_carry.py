"""The rules of ``dblp.collectives.carry`` on whole arrays, as one would write them down: what ``Residual`` is held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from dblp.collectives.carry import NOTHING, Account
from dblp.collectives.keyed import Slice
from dblp.collectives.pieces import PIECE
from dblp.collectives.reduction import energy, narrow_bfloat16, widen_bfloat16
from dblp.transport.policy import CarryBound

BY_NORM = (CarryBound.NORM, CarryBound.DECAY)


class DenseCarry:
    """What one rank carries of one flat gradient, with the methods of ``Residual``."""

    def __init__(self, size, dtype=np.float32, *, on_discard=None):
        self.size, self.dtype, self.on_discard = size, np.dtype(dtype), on_discard
        self.layers: list[Any] = []  # by age, the newest first; one of all ages unless they are told apart
        self.velocity: Any = None
        self.kept: Any = None
        self.ranks: Any = None
        self.rounding: Any = None
        self.reference: Any = None
        self.abandon()

    @property
    def empty(self):
        return not self.layers

    @property
    def values(self):
        return sum(self.layers, start=self.zeros())

    def begin(self, array, kind, rule, *, weigh=False, contributes=True):
        self.abandon(carried=self.layers)
        self.rule, self.bfloat16 = rule, kind.name == "bfloat16"
        gradient = self.widen(array).astype(self.dtype)
        if rule is not None and rule.momentum:
            faded = self.zeros() if self.velocity is None else self.velocity * self.dtype.type(rule.momentum)
            gradient = self.velocity = faded + gradient
        elif self.empty:
            if weigh and contributes and rule is not None and rule.bound in BY_NORM:
                self.reference = energy(array, kind)
            return
        if contributes and (weigh or not self.empty):
            self.reference = float(piece_energies(gradient).sum())
        sent = sum(self.layers, start=gradient)
        array[...] = narrow_bfloat16(sent) if self.bfloat16 else sent
        if kind.half:
            self.rounding = sent - self.widen(array)

    def keep(self, first, values, *, divisor=1, ranks=1):
        if self.kept is None:
            self.kept, self.ranks = self.zeros(), np.ones(-(-self.size // PIECE))
        stop = first + values.size
        self.kept[first:stop] += self.widen(values).astype(self.dtype) * self.dtype.type(divisor)
        pieces = self.ranks[first // PIECE : -(-stop // PIECE)]
        np.maximum(pieces, max(ranks, divisor), out=pieces)

    def settle(self, energy_sent=0.0):
        before, rule = self.layers, self.rule
        kept, rounding, reference, ranks = self.kept, self.rounding, self.reference, self.ranks
        self.abandon()
        if rule is not None and self.velocity is not None:
            self.settle_velocity(kept, rule.masking)
        if kept is None and rounding is None:
            return NOTHING, NOTHING
        kept = self.zeros() if kept is None else kept
        rounding = self.zeros() if rounding is None else rounding
        if rule is None:
            return NOTHING, self.discard(kept + rounding)
        lost = kept != 0
        half = kept * self.dtype.type(0.5)
        kept = kept + rounding
        finite = np.isfinite(kept)
        spoiled = self.discard(np.where(finite, 0, kept)) if not finite.all() else NOTHING
        kept, half = np.where(finite, kept, 0), np.where(finite, half, 0)
        discarded = NOTHING
        if rule.bound is CarryBound.AGE:
            older = [np.where(lost & finite, layer, 0) for layer in before]
            for layer in older:
                kept = kept - layer
            limit = int(rule.limit)
            self.layers = [kept, *older][:limit]
            if len(older) >= limit:
                discarded = self.discard(older[limit - 1])
        else:
            if rule.bound is CarryBound.DECAY:
                kept = kept - half
                discarded += self.discard(half)
            self.layers = [kept]
            if rule.bound in BY_NORM:
                most = rule.limit**2 * (energy_sent if reference is None else reference)
                discarded += self.within(kept, most, ranks)
        carried = account(self.values)
        if not carried.elements:
            self.layers = []
        return carried, spoiled + discarded

    def abandon(self, carried=()):
        self.layers = list(carried)
        self.kept = self.ranks = self.rounding = self.reference = None

    def within(self, kept, most, ranks):
        """Drop pieces, the least energy first, until ``most`` is left; in place."""
        energies = piece_energies(kept) / (1 if ranks is None else ranks**2)
        if energies.sum() <= most:
            return NOTHING
        order = np.argsort(energies, kind="stable")[::-1]
        fit = int(np.searchsorted(np.cumsum(energies[order]), most, side="right"))
        mask = np.isin(np.arange(self.size) // PIECE, order[fit:])
        dropped = np.where(mask, kept, 0)
        kept[mask] = 0
        return self.discard(dropped)

    def settle_velocity(self, kept, masking):
        if masking and kept is None:
            self.velocity = None
            return
        restarts = ~np.isfinite(self.velocity) | (kept == 0 if masking else False)
        self.velocity = np.where(restarts, 0, self.velocity)

    def discard(self, values):
        if self.on_discard is not None:
            self.on_discard(values)
        return account(values)

    def widen(self, values):
        return widen_bfloat16(values) if self.bfloat16 else values

    def zeros(self):
        return np.zeros(self.size, self.dtype)

    def take(self, low, high):
        velocity = None if self.velocity is None else self.velocity[low:high].copy()
        return Slice([layer[low:high].copy() for layer in self.layers], velocity)

    def put(self, low, part):
        for age, values in enumerate(part.layers):
            if not values.any():
                continue
            while len(self.layers) <= age:
                self.layers.append(self.zeros())
            self.layers[age][low : low + values.size] = values
        if part.velocity is not None:
            self.velocity = self.zeros() if self.velocity is None else self.velocity
            self.velocity[low : low + part.velocity.size] = part.velocity


def piece_energies(values):
    """Sum of squares of each piece; the last may be short, where zeros behind it would change the order of the sum."""
    whole = values.size // PIECE * PIECE
    rows, rest = values[:whole].reshape(-1, PIECE), values[whole:]
    last = [np.einsum("i,i->", rest, rest)] if rest.size else []
    return np.array([*np.einsum("ij,ij->i", rows, rows), *last], np.float64)


def account(values):
    return Account(
        elements=int(np.count_nonzero(values)),
        total=float(values.sum(dtype=np.float64)),
        energy=float(piece_energies(values).sum()),
    )
