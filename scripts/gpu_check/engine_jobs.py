# SPDX-License-Identifier: Apache-2.0
"""A job with Transformer Engine that loses a worker, where the package is there. Imports the standard library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Final

from faulty_jobs import BF16, Case, run_cases
from setting import Row, Setting

ENGINE: Final = ("--transformer-impl", "transformer_engine")
CASES: Final[Mapping[str, Case]] = {
    "engine": Case(2, BF16 + ENGINE, ("kill:1@5:backward",)),
}


def run(setting: Setting) -> Iterator[Row]:
    if importlib.util.find_spec("transformer_engine") is None:
        yield {"case": "engine", "ok": True, "left_out": "Transformer Engine is not installed here"}
    else:
        yield from run_cases(setting, CASES)
