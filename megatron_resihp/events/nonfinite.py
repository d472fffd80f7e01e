# SPDX-License-Identifier: Apache-2.0
"""Numbers that JSON cannot spell: NaN and the infinities travel as the strings "nan", "inf" and "-inf".

An overflow step really has an infinite gradient norm, and a log that only Python can parse is no log.
May import: the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SPELLINGS = ("nan", "inf", "-inf")


def jsonable(value: Any) -> Any:
    """`value` with dictionary keys as strings and every non-finite float spelled out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value
