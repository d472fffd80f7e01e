# SPDX-License-Identifier: Apache-2.0
"""The packages that the small installation lacks, and the line that says so. May import: the standard library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

TRAIN: Final = {"torch": "torch", "megatron.core": "megatron-core"}
"""The packages of the extra `train`, by module."""


def missing(modules: Sequence[str], find: Callable[[str], object] = find_spec) -> str | None:
    """The line for a user without all of `modules`, which are keys of TRAIN; None if they are there."""
    absent = [TRAIN[module] for module in modules if not _is_there(module, find)]
    if not absent:
        return None
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"{' and '.join(absent)} {verb} not installed, which training needs; "
        "run pip install '.[train]' in the checkout of megatron-resihp"
    )


def _is_there(module: str, find: Callable[[str], object]) -> bool:
    try:
        return find(module) is not None
    except ModuleNotFoundError:
        # The module's parent package is missing.
        return False
