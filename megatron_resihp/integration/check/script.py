# SPDX-License-Identifier: Apache-2.0
"""What a training script's text says of its flags; the script is not run. Imports the standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DEFAULTS: Final = "args_defaults"
"""Megatron's name for what a script gives flags that the user leaves out."""


@dataclass(frozen=True)
class ScriptFlags:
    """Attributes:
    added: flags that the script, or a module beside it, adds to Megatron's.
    defaults: the script's own defaults of Megatron's arguments.
    """

    added: frozenset[str]
    defaults: Mapping[str, Any]


def read_script(path: Path) -> ScriptFlags:
    """Look through a script and the modules beside it that it imports."""
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
        waiting += [file.with_name(f"{name}.py") for name in _imported(tree)]
    return ScriptFlags(frozenset(added), defaults)


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." not in alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and "." not in node.module and not node.level:
            yield node.module


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
