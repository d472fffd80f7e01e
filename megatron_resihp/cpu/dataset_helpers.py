# SPDX-License-Identifier: Apache-2.0
"""Megatron's compiled dataset helper: a fresh checkout lacks it, so the wheel's is borrowed there.

The wheel has no Makefile to compile with, and a checkout's needs pybind11. May import megatron.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from megatron.core import package_info
from megatron.core.datasets import utils as dataset_utils

MODULE = "megatron.core.datasets.helpers_cpp"
WHEEL = "megatron-core"


def install() -> None:
    if importlib.util.find_spec(MODULE) is not None or borrow(wheels_helper()):
        dataset_utils.compile_helpers = _nothing_to_compile
    else:
        dataset_utils.compile_helpers = saying_what_it_needs(dataset_utils.compile_helpers)


def borrow(file: Path | None) -> bool:
    """Use this compiled file as the helper; returns whether it could be loaded."""
    spec = importlib.util.spec_from_file_location(MODULE, file) if file is not None else None
    if spec is None or spec.loader is None:
        return False
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return False
    sys.modules[MODULE] = module
    return True


def wheels_helper() -> Path | None:
    """The file in an installed wheel of the same minor version; None: there is none."""
    try:
        wheel = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        return None
    if wheel.version.split(".")[:2] != package_info.__version__.split(".")[:2]:
        return None
    found = (wheel.locate_file(path) for path in wheel.files or () if path.name.startswith("helpers_cpp."))
    return next((Path(str(path)) for path in found if Path(str(path)).is_file()), None)


def saying_what_it_needs(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Megatron's own compilation, which runs make, with a clear line if it fails."""

    def compile_or_say() -> None:
        try:
            compile_helpers()
        except SystemExit:
            directory = os.path.dirname(os.path.abspath(dataset_utils.__file__))
            mend = f"pip install {WHEEL}, which has it compiled, or: pip install pybind11 && make -C {directory}"
            sys.exit(f"resihp: Megatron's dataset helper is not compiled; {mend}")

    return compile_or_say


def _nothing_to_compile() -> None:
    pass
