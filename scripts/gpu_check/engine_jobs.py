# SPDX-License-Identifier: Apache-2.0
"""Jobs with Transformer Engine that lose a worker, where the package is there. Imports the standard library.

With dropout, Transformer Engine's generators must give the masks of an undisturbed job: in fp32 other masks would show.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from faulty_jobs import BF16, FP32, Case, run_case
from setting import Row, Setting

ENGINE: Final = ("--transformer-impl", "transformer_engine")
DROPOUT: Final = ("--te-rng-tracker", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
EIGHT_BITS: Final = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
CASES: Final[Mapping[str, Case]] = {
    "engine": Case(2, BF16 + ENGINE, ("kill:1@5:backward",)),
    "engine-dropout": Case(2, FP32 + ENGINE + DROPOUT, ("kill:1@5:backward",)),
    "engine-eight-bits": Case(2, BF16 + ENGINE + EIGHT_BITS, ("kill:1@5:backward",)),
}


def run(setting: Setting, name: str) -> Row:
    if importlib.util.find_spec("transformer_engine") is None:
        return {"ok": True, "left_out": "Transformer Engine is not installed here"}
    return run_case(setting, name, CASES[name])
