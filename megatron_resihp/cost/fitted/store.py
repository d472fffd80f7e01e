# SPDX-License-Identifier: Apache-2.0
"""CostModel ↔ a versioned JSON file, so that a resumed job needs no warm-up. Imports the standard library and numpy."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatron_resihp.cost.fitted.fit import Fits
from megatron_resihp.cost.fitted.model import CostModel, LinkCost

FILE_NAME: Final = "cost_model.json"
VERSION: Final = 1
MEND: Final = "to warm up anew, remove it and don't name it"


class CostModelError(Exception):
    """A file is no cost model that this version can read; the message is "cause; mend" in one line."""


def save(model: CostModel, path: Path, sections: Mapping[str, Any] | None = None) -> None:
    """Write the model, and what others keep beside it; a reader never sees half a file. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({**to_json(model), **(sections or {})}, allow_nan=False))
    os.replace(partial, path)


def load(path: Path) -> CostModel:
    """Read what `save` wrote.

    Raises:
        CostModelError: the file is missing, damaged, or of another version.
    """
    data = read(path)
    try:
        return from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise CostModelError(f"{path} is no complete cost model ({error!r}); {MEND}") from None


def read(path: Path) -> dict[str, Any]:
    """The file's plain values, sections of others too.

    Raises:
        CostModelError: the file is missing, no JSON, or of another version.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise CostModelError(f"{path} cannot be read ({error.strerror}); give the file that a run has saved") from None
    except ValueError:
        raise CostModelError(f"{path} is not JSON; {MEND}") from None
    found = data.get("version") if isinstance(data, dict) else None
    if found != VERSION:
        raise CostModelError(f"{path} is a cost model of version {found}, this is version {VERSION}; {MEND}")
    return dict(data)


def to_json(model: CostModel) -> dict[str, Any]:
    """Plain values; null stands for NaN."""
    return {
        "version": VERSION,
        "ops": _fits_to_json(model.ops),
        "collectives": _fits_to_json(model.collectives),
        "links": [
            {"workers": list(pair), "latency": link.latency, "seconds_per_byte": link.seconds_per_byte,
             "informative": link.informative, "noise": _number(link.noise)}
            for pair, link in model.links.items()
        ],
        "terms": dict(model.terms),
        "micro_batch_mape": _number(model.micro_batch_mape),
        "iteration_mape": _number(model.iteration_mape),
    }  # fmt: skip


def from_json(data: Mapping[str, Any]) -> CostModel:
    """Raises KeyError, TypeError or ValueError where `data` is not what `to_json` gives."""
    return CostModel(
        ops=_fits_from_json(data["ops"]),
        collectives=_fits_from_json(data["collectives"]),
        links={
            (int(link["workers"][0]), int(link["workers"][1])): LinkCost(
                float(link["latency"]), float(link["seconds_per_byte"]), bool(link["informative"]), _nan(link["noise"])
            )
            for link in data["links"]
        },
        terms={str(name): float(seconds) for name, seconds in data["terms"].items()},
        micro_batch_mape=_nan(data["micro_batch_mape"]),
        iteration_mape=_nan(data["iteration_mape"]),
    )


_TYPES = {"informative": np.bool_, "finding": np.int64, "samples": np.int64}


def _fits_to_json(fits: Fits) -> dict[str, Any]:
    return {each.name: _nested(getattr(fits, each.name).tolist()) for each in fields(Fits)}


def _fits_from_json(data: Mapping[str, Any]) -> Fits:
    names = [each.name for each in fields(Fits)]
    arrays: dict[str, Any] = {name: np.array(data[name], dtype=_TYPES.get(name, np.float64)) for name in names}
    shapes = {array.shape[:3] for array in arrays.values()}
    if len(shapes) != 1 or arrays["alpha"].ndim != 3 or arrays["information"].shape[3:] != (3, 3):
        raise ValueError(f"coefficients of shapes {sorted(shapes)} instead of one [stages, kinds, chunks]")
    return Fits(**arrays)


def _nested(value: Any) -> Any:
    return [_nested(item) for item in value] if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
