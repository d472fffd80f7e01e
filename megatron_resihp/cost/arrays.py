# SPDX-License-Identifier: Apache-2.0
"""Arrays as fields of dataclasses in JSON: nested lists, in which null stands for NaN.

Imports numpy and `coding`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_resihp.coding import Form, WrongValueError
from megatron_resihp.coding.decoding import MOST_ITEMS


def _nested(array: NDArray[Any]) -> Any:
    return _without_nan(array.tolist())


def _without_nan(value: Any) -> Any:
    return [_without_nan(item) for item in value] if isinstance(value, list) else null_for_nan(value)


def null_for_nan(value: Any) -> Any:
    """The JSON value of a number that may be NaN or infinite: null for those."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _array_of(dtype: DTypeLike, kinds: str) -> Form:
    """The form of an array of this type. `kinds`: numpy's type letters that the list may have; O: numbers and nulls."""

    def read(value: Any) -> NDArray[Any]:
        if not isinstance(value, list):
            raise WrongValueError("is not a list of numbers")
        if len(value) > MOST_ITEMS:
            raise WrongValueError(f"has {len(value)} items, more than {MOST_ITEMS}")
        try:
            found = np.array(value)
        except (OverflowError, ValueError):
            raise WrongValueError("is not an array of numbers") from None
        if found.size and (found.dtype.kind not in kinds or not _are_numbers(found)):
            raise WrongValueError(f"is not an array of {np.dtype(dtype).name}")
        return found.astype(dtype)

    return Form(_nested, read)


def _are_numbers(found: NDArray[Any]) -> bool:
    return found.dtype.kind != "O" or all(each is None or type(each) in (float, int) for each in found.flat)


Floats = Annotated[NDArray[np.float64], _array_of(np.float64, "fiuO")]
Ints = Annotated[NDArray[np.int64], _array_of(np.int64, "i")]
Flags = Annotated[NDArray[np.bool_], _array_of(np.bool_, "b")]
