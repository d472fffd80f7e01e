# SPDX-License-Identifier: Apache-2.0
"""What a training script's text says of its flags; the script is not run. Imports the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MEGATRON: Final = "megatron"
"""The folder of its packages in a checkout."""
DEFAULTS: Final = "args_defaults"
"""Megatron's name for what a script gives flags that the user leaves out."""


@dataclass(frozen=True)
class ScriptFlags:
    """Attributes:
    added: flags that the script, or a module that it imports, adds to Megatron's.
    defaults: the script's own defaults of Megatron's arguments.
    """

    added: frozenset[str]
    defaults: Mapping[str, Any]


def read_script(path: Path, folders: Sequence[Path] = ()) -> ScriptFlags:
    """Look through a script and the modules that it imports, but not through what Megatron's own import.

    Args:
        folders: where modules may be, besides the script's own.
    """
    roots = [path.resolve().parent, *folders]
    added: set[str] = set()
    defaults: dict[str, Any] = {}
    waiting, seen = [path.resolve()], set[Path]()
    while waiting:
        file = waiting.pop()
        tree = None if file in seen else _parsed(file)
        seen.add(file)
        if tree is None:
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            added.update(_added_by(call))
            if file == path.resolve():
                defaults |= _defaults_in(call)
        if not _is_megatrons(file, roots):
            waiting += [found for name in _imported(tree) for found in _files_of(name, roots)]
    return ScriptFlags(frozenset(added), defaults)


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(module: str, roots: Sequence[Path]) -> list[Path]:
    """The file of a module in the first folder that has it; none: it is not in these."""
    place = Path(*module.split("."))
    files = (root / name for root in roots for name in (place.with_suffix(".py"), place / "__init__.py"))
    return [file.resolve() for file in files if file.is_file()][:1]


def _is_megatrons(file: Path, roots: Sequence[Path]) -> bool:
    return any(file.is_relative_to(root.resolve() / MEGATRON) for root in roots)


def _added_by(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
        texts = (each.value for each in call.args if isinstance(each, ast.Constant))
        yield from (text for text in texts if isinstance(text, str) and text.startswith("--"))


def _defaults_in(call: ast.Call) -> dict[str, Any]:
    for keyword in call.keywords:
        if keyword.arg == DEFAULTS:
            try:
                found = ast.literal_eval(keyword.value)
            except ValueError:
                continue
            return dict(found) if isinstance(found, dict) else {}
    return {}
