# SPDX-License-Identifier: Apache-2.0
"""Which Megatron would be imported here, found without importing any of it.

A fork's checkout may fail as it is imported, and its version says why. Imports the standard library only.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

VERSION_FILE: Final = "package_info.py"


@dataclass(frozen=True)
class Tree:
    """A Megatron.

    Attributes:
        folder: the one that has `megatron`.
        numbers: of its major and minor version; None: it tells none.
        version: all of it, for a message.
    """

    folder: Path
    numbers: tuple[int, int] | None
    version: str

    def __str__(self) -> str:
        return f"{self.version} in {self.folder}"


def found() -> Tree | None:
    """The one that `import megatron.core` would take; None: there is none."""
    spec = next(_specs("megatron.core", _locations("megatron")), None)
    if spec is None or spec.origin is None:
        return None
    core = Path(spec.origin).parent
    return tree_of(core.parent.parent, _constants(core / VERSION_FILE))


def tree_of(folder: Path, values: Mapping[str, Any]) -> Tree:
    """The Megatron of a folder, by the numbers that its `package_info` holds."""
    parts = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    numbers = [part for part in parts if isinstance(part, int)]
    if len(numbers) < 3:
        return Tree(folder, None, "of no known version")
    version = ".".join(map(str, numbers)) + str(values.get("PRE_RELEASE", ""))
    return Tree(folder, (numbers[0], numbers[1]), version)


def _locations(package: str) -> list[str] | None:
    """Where a package's modules are. Parts of one without an `__init__` may be in several folders."""
    spec = next(_specs(package, None), None)
    return None if spec is None or spec.submodule_search_locations is None else [*spec.submodule_search_locations]


def _specs(name: str, path: list[str] | None) -> Iterator[ModuleSpec]:
    """As Python's own finders answer, which importlib.util asks only once parent packages are imported."""
    if "." in name and path is None:
        return
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, path)) is not None:
            yield spec


def _constants(file: Path) -> dict[str, Any]:
    """What a module sets to a constant."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
