# SPDX-License-Identifier: Apache-2.0
"""What a resumed job can start from: the cost of work, and the noise of devices and links.

It excludes the devices' own levels, since a resumed job may run on other devices. The cost model's file holds the noise
as a section. Imports numpy, `coding` and `cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_resihp.coding import FILE, WrongValueError, decode, encode
from megatron_resihp.cost.arrays import Floats
from megatron_resihp.cost.fitted import store as store
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.cost.fitted.store import CostModelError
from megatron_resihp.detector.judging.noise import KnownNoise

Members = tuple[int, ...]


@dataclass(frozen=True)
class _Units:
    """`UnitsNoise` as the file stores it."""

    members: tuple[Members, ...]
    transient: int
    near: Floats
    far: Floats
    weight: Floats
    far_weight: Floats
    tail: Floats


@dataclass(frozen=True)
class _Noise:
    workers: _Units
    links: _Units


@dataclass(frozen=True)
class _Section:
    """The section added to the file of the cost model."""

    noise: _Noise


@dataclass(frozen=True)
class UnitsNoise:
    """Noise of some units.

    Attributes:
        members: worker ids of each unit: a worker, the members of a tensor-parallel group, or the ends of a link.
        noise: arrays with one element per unit.
    """

    members: tuple[Members, ...]
    noise: KnownNoise

    def of(self, members: Sequence[Members]) -> KnownNoise | None:
        """Noise of other units, by their members; None if nothing is known."""
        numbers = {each: number for number, each in enumerate(self.members)}
        return self.noise.of(np.array([numbers.get(each, -1) for each in members], dtype=np.int64))


@dataclass(frozen=True)
class Learned:
    """What a run has learned.

    Attributes:
        model: the cost of work.
        workers, links: their noise.
    """

    model: CostModel
    workers: UnitsNoise
    links: UnitsNoise


def save(learned: Learned, path: Path) -> None:
    """Write it atomically; `cost.fitted.store.load` can read the file's cost model. Raises OSError."""
    section = _Section(_Noise(_written(learned.workers), _written(learned.links)))
    store.save(learned.model, path, encode(section))


def load(path: Path) -> Learned:
    """Read what `save` wrote.

    Raises:
        CostModelError: the file is missing, damaged, or of another version; the message is one line.
    """
    data = store.read(path)
    model = store.load(path)
    try:
        noise = decode(_Section, data, FILE).noise
        return Learned(model, _noise("workers", noise.workers), _noise("links", noise.links))
    except WrongValueError as error:
        raise CostModelError(f"{path} says nothing usable of noise ({error}); {store.MEND}") from None


def _written(units: UnitsNoise) -> _Units:
    noise = units.noise
    return _Units(units.members, noise.transient, noise.near, noise.far, noise.weight, noise.far_weight, noise.tail)


def _noise(name: str, units: _Units) -> UnitsNoise:
    """Raises WrongValueError if the arrays do not fit each other."""
    noise = KnownNoise(units.near, units.far, units.weight, units.far_weight, units.tail, units.transient)
    if not noise.shape_is_sound or noise.near.shape[1] != len(units.members):
        raise WrongValueError(f"has arrays that do not fit each other or {len(units.members)} units", "noise", name)
    return UnitsNoise(units.members, noise)
