# SPDX-License-Identifier: Apache-2.0
"""What a training script's text says of its flags; the script is not run.

Imports the standard library and `parser_calls`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_resihp.integration.check.parser_calls import shows_all_flags

MEGATRON: Final = "megatron"
"""The folder of its packages in a checkout."""
DEFAULTS: Final = "args_defaults"
"""Megatron's name for what a script gives flags that the user leaves out."""


@dataclass(frozen=True)
class ScriptFlags:
    """Attributes:
    added: flags that the script, or a module that it imports, adds to Megatron's.
    defaults: the script's own defaults of Megatron's arguments.
    complete: whether the script can add no other flags.
    takes_words: whether it takes short options, or words that belong to no flag.
    """

    added: frozenset[str]
    defaults: Mapping[str, Any]
    complete: bool = False
    takes_words: bool = False


def read_script(path: Path, folders: Sequence[Path] = ()) -> ScriptFlags:
    """Look through a script and the modules that it imports, but not through what Megatron's own import.

    Args:
        folders: where modules may be, besides the script's own.
    """
    roots = [path.resolve().parent, *folders]
    script = _parsed(path)
    if script is None:
        return ScriptFlags(frozenset(), {})
    read, lacking = _modules_of(script, path.resolve(), roots)
    trees = [script, *read.values()]
    added = {flag for tree in trees for call in _calls(tree) for flag in _added_by(call)}
    defaults: dict[str, Any] = {}
    for call in _calls(script):
        defaults |= _defaults_in(call)
    own = [script, *(tree for name, tree in read.items() if not name.startswith(f"{MEGATRON}."))]
    takes_words = any(not name.startswith("--") for tree in own for call in _calls(tree) for name in _names_in(call))
    return ScriptFlags(frozenset(added), defaults, shows_all_flags(script, read, lacking), takes_words)


def _modules_of(script: ast.Module, path: Path, roots: Sequence[Path]) -> tuple[dict[str, ast.Module], set[str]]:
    """The text of the modules that a script and these import, by name, and the names of those that have none here.
    What Megatron's own import isn't looked at."""
    read, lacking = dict[str, ast.Module](), set[str]()
    waiting, seen = [*_imported(script)], {path}
    while waiting:
        name, attribute = waiting.pop()
        # A module may import a function from another one, or a module from a package.
        files = _files_of(name, roots)
        inner = _files_of(f"{name}.{attribute}", roots) if attribute else []
        if not files and not inner:
            lacking.add(name)
        for module, file in ((name, files), (f"{name}.{attribute}", inner)):
            fresh = [each for each in file if each not in seen]
            seen.update(fresh)
            for each in fresh:
                tree = _parsed(each)
                if tree is None:
                    lacking.add(module)
                    continue
                read[module] = tree
                if not _is_megatrons(each, roots):
                    waiting += _imported(tree)
    return read, lacking


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules, and what is imported from them; relative imports, too, which name no module that is found."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{'.' * node.level}{node.module or ''}", alias.name) for alias in node.names)


def _files_of(module: str, roots: Sequence[Path]) -> list[Path]:
    """The file of a module in the first folder that has it; none: it is not in these."""
    if module.startswith("."):
        return []
    place = Path(*module.split("."))
    files = (root / name for root in roots for name in (place.with_suffix(".py"), place / "__init__.py"))
    return [file.resolve() for file in files if file.is_file()][:1]


def _is_megatrons(file: Path, roots: Sequence[Path]) -> bool:
    return any(file.is_relative_to(root.resolve() / MEGATRON) for root in roots)


def _added_by(call: ast.Call) -> Iterator[str]:
    flags = [name for name in _names_in(call) if name.startswith("--")]
    yield from flags
    if any(each.arg == "action" and not isinstance(each.value, ast.Constant) for each in call.keywords):
        # argparse.BooleanOptionalAction adds these, too.
        yield from (f"--no-{flag.removeprefix('--')}" for flag in flags)


def _names_in(call: ast.Call) -> list[str]:
    """By what names a call adds an argument, as far as they are spelled out; none: it adds none."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
        return []
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    return [text for text in texts if isinstance(text, str)]


def _defaults_in(call: ast.Call) -> dict[str, Any]:
    for keyword in call.keywords:
        if keyword.arg == DEFAULTS:
            try:
                found = ast.literal_eval(keyword.value)
            except ValueError:
                continue
            return dict(found) if isinstance(found, dict) else {}
    return {}
