# SPDX-License-Identifier: Apache-2.0
"""What all tests share. Imports nothing heavy: the planner's tests should start at once."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Inherited by the training processes that integration tests start: they share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the installed Megatron lacks and, unless it is asked for, what is for the night."""
    installed = importlib.metadata.version("megatron-core")
    for item in items:
        needed = item.get_closest_marker("since_megatron")
        if needed and _release(installed) < _release(needed.args[0]):
            item.add_marker(pytest.mark.skip(reason=f"Megatron {installed} is older than {needed.args[0]}"))
    if os.environ.get("RESIHP_NIGHTLY"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Note what was skipped, and why, for scripts that say it at their end."""
    notes = os.environ.get("RESIHP_LEFT_OUT")
    if notes:
        with open(notes, "a") as file:
            for report in terminalreporter.stats.get("skipped", ()):
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                print(f"  {report.nodeid}: {reason.removeprefix('Skipped: ')}", file=file)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import scripts/NAME.py as a module, without running it."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load
