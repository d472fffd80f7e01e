# SPDX-License-Identifier: Apache-2.0
"""Stores a CostModel as versioned JSON, so that a resumed job needs no warm-up. Imports `coding`, this package."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from megatron_resihp.coding import FILE, WrongValueError, decode, encode, shown, version_said
from megatron_resihp.cost.arrays import null_for_nan
from megatron_resihp.cost.fitted.fit import Fits
from megatron_resihp.cost.fitted.model import CostModel, LinkCost

FILE_NAME: Final = "cost_model.json"
VERSION: Final = 1
MEND: Final = "to warm up again, remove the file and do not name it"


@dataclass(frozen=True)
class _Link:
    workers: tuple[int, int]
    latency: float
    seconds_per_byte: float
    informative: bool
    noise: float | None


@dataclass(frozen=True)
class _Written:
    """The file's fields; null stands for NaN."""

    version: int
    ops: Fits
    collectives: Fits
    links: tuple[_Link, ...]
    terms: dict[str, float]
    micro_batch_mape: float | None
    iteration_mape: float | None


class CostModelError(Exception):
    """A file is no cost model that this version can read; the message is "cause; mend" in one line."""


def save(model: CostModel, path: Path, sections: Mapping[str, Any] | None = None) -> None:
    """Write the model and other modules' sections atomically. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({**encode(_written(model)), **(sections or {})}, allow_nan=False))
    os.replace(partial, path)


def load(path: Path) -> CostModel:
    """Read what `save` wrote.

    Raises:
        CostModelError: the file is missing, damaged, or of another version.
    """
    data = read(path)
    try:
        return _model(decode(_Written, data, FILE))
    except WrongValueError as error:
        raise CostModelError(f"{path} is not a complete cost model ({error}); {MEND}") from None


def read(path: Path) -> Any:
    """The file's plain values, including other modules' sections.

    Raises:
        CostModelError: the file is missing, not JSON, or of another version.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise CostModelError(f"{path} cannot be read ({error.strerror}); give the file that a run has saved") from None
    except ValueError:
        raise CostModelError(f"{path} is not JSON; {MEND}") from None
    try:
        found = version_said(data)
    except WrongValueError:
        found = None
    if found != VERSION:
        raise CostModelError(f"{path} is a cost model of version {shown(found)}, this is version {VERSION}; {MEND}")
    return data


def _written(model: CostModel) -> _Written:
    links = tuple(
        _Link(pair, link.latency, link.seconds_per_byte, link.informative, null_for_nan(link.noise))
        for pair, link in model.links.items()
    )
    return _Written(
        VERSION, model.ops, model.collectives, links, dict(model.terms), null_for_nan(model.micro_batch_mape),
        null_for_nan(model.iteration_mape),
    )  # fmt: skip


def _model(written: _Written) -> CostModel:
    """Raises WrongValueError if the arrays do not fit each other."""
    for name, fits in (("ops", written.ops), ("collectives", written.collectives)):
        _check_shapes(name, fits)
    links = {
        link.workers: LinkCost(link.latency, link.seconds_per_byte, link.informative, _nan(link.noise))
        for link in written.links
    }
    return CostModel(
        written.ops, written.collectives, links, written.terms, _nan(written.micro_batch_mape),
        _nan(written.iteration_mape),
    )  # fmt: skip


def _check_shapes(name: str, fits: Fits) -> None:
    shapes = {getattr(fits, each.name).shape[:3] for each in fields(Fits)}
    if len(shapes) != 1 or fits.alpha.ndim != 3 or fits.information.shape[3:] != (3, 3):
        raise WrongValueError(
            f"has coefficients of shapes {sorted(shapes)} instead of one [stages, kinds, chunks]", name
        )


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
