# SPDX-License-Identifier: Apache-2.0
"""What a resumed job can start from: what work costs, and how noisy devices and links are. Imports numpy and `cost`.

Not the devices' own levels: a resumed job may run on other devices. One file, that of the cost model, with the noise as
a section of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatron_resihp.cost.fitted import store as store
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.cost.fitted.store import CostModelError
from megatron_resihp.detector.judging.noise import KnownNoise

Members = tuple[int, ...]

SECTION: Final = "noise"
_ARRAYS = ("near", "far", "weight", "far_weight", "tail")


@dataclass(frozen=True)
class UnitsNoise:
    """Noise of some units.

    Attributes:
        members: worker ids of each: a worker, those of a tensor-parallel group, or the ends of a link.
        noise: arrays with an element for each.
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
        model: what work costs.
        workers, links: how noisy they are.
    """

    model: CostModel
    workers: UnitsNoise
    links: UnitsNoise


def save(learned: Learned, path: Path) -> None:
    """Write it; a reader never sees half a file, and `cost.fitted.store.load` reads its cost model. Raises OSError."""
    store.save(
        learned.model, path, {SECTION: {name: _to_json(getattr(learned, name)) for name in ("workers", "links")}}
    )


def load(path: Path) -> Learned:
    """Read what `save` wrote.

    Raises:
        CostModelError: the file is missing, damaged, or of another version; the message is one line.
    """
    data = store.read(path)
    model = store.load(path)
    try:
        return Learned(model, _from_json(data[SECTION]["workers"]), _from_json(data[SECTION]["links"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CostModelError(f"{path} says nothing usable of noise ({error!r}); {store.MEND}") from None


def _to_json(units: UnitsNoise) -> dict[str, Any]:
    arrays = {name: getattr(units.noise, name).tolist() for name in _ARRAYS}
    return {"members": [list(each) for each in units.members], "transient": units.noise.transient, **arrays}


def _from_json(data: Mapping[str, Any]) -> UnitsNoise:
    members = tuple(tuple(map(int, each)) for each in data["members"])
    arrays = {name: np.array(data[name], dtype=np.float64) for name in _ARRAYS}
    noise = KnownNoise(**arrays, transient=int(data["transient"]))
    if not noise.shape_is_sound or noise.near.shape[1] != len(members):
        raise ValueError(f"arrays do not fit each other or {len(members)} units")
    return UnitsNoise(members, noise)
