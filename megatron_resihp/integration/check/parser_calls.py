# SPDX-License-Identifier: Apache-2.0
"""Whether the text of a script and of what it imports shows all flags that its parser can have.

Only then is a flag that the text lacks one on which the job ends. Imports the standard library only.
"""

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Final

PARSING: Final = ("parse_and_validate_args", "parse_args", "initialize_megatron", "pretrain")
"""Megatron's functions that parse the command line, in its releases; the first that a script calls does."""
PROVIDER: Final = "extra_args_provider"
"""Their argument for a function that adds flags."""
BEFORE_PROVIDER: Final = 5
"""Positional arguments of `pretrain` before that one, in the releases in which it has it."""
KNOWN: Final = frozenset({"megatron", "torch", "numpy", "transformer_engine", "megatron_resihp"})
"""Packages that add no flags when they are imported, besides the standard library."""
LOADING: Final = ("import_module", "__import__", "exec", "eval", "run_path", "run_module")
"""Functions that run code which the text does not show."""
ADDING: Final = ("add_argument", "add_argument_group", "add_mutually_exclusive_group", "set_defaults")


def shows_all_flags(script: ast.Module, read: Mapping[str, ast.Module], lacking: Collection[str]) -> bool:
    """Whether there can be no flags but Megatron's and those that the text adds.

    Args:
        script: its text.
        read: modules that it imports, by name, of which the text is known.
        lacking: modules that it or these import, of which it isn't.
    """
    packages = {name.partition(".")[0] for name in lacking}
    if not packages <= KNOWN | sys.stdlib_module_names:
        return False
    own = [script, *(tree for name, tree in read.items() if not name.startswith("megatron."))]
    if any(_name(call) in LOADING for tree in own for call in _calls(tree) if not _is_of_a_spec(call)):
        return False
    if any(map(_touches_command_line, own)):
        return False
    parsing = [call for call in _calls(script) if _name(call) in PARSING]
    if not parsing or any(_name(call) in PARSING for tree in own[1:] for call in _calls(tree)):
        return False
    return all(_is_clear(call, script, read) for call in parsing) and all(map(_names_flags, own))


def _is_clear(call: ast.Call, script: ast.Module, read: Mapping[str, ast.Module]) -> bool:
    """Whether a call that may parse shows which functions add flags, and these show all that they add."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if {None, "ignore_unknown_args"} & keywords.keys() or any(isinstance(each, ast.Starred) for each in call.args):
        return False
    if len(call.args) > (BEFORE_PROVIDER if _name(call) == "pretrain" else 0):
        return False
    provider = keywords.get(PROVIDER)
    return provider is None or all(_adds_in_sight(each, script, read) for each in _branches(provider))


def _touches_command_line(tree: ast.AST) -> bool:
    """Whether a script may take words out before they are parsed, or have another function parse them."""
    nodes = list(ast.walk(tree))
    imported = (alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
    named = (node.attr for node in nodes if isinstance(node, ast.Attribute))
    changed = (node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return "argv" in {*imported, *named} or any(name in PARSING for name in changed)


def _branches(value: ast.expr) -> list[ast.expr]:
    return [*_branches(value.body), *_branches(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _adds_in_sight(provider: ast.expr, script: ast.Module, read: Mapping[str, ast.Module]) -> bool:
    if isinstance(provider, ast.Constant):
        return provider.value is None
    if not isinstance(provider, ast.Name):
        return False
    trees = [script, *(read[module] for module in _sources(provider.id, script) if module in read)]
    found = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == provider.id and not node.decorator_list
    ]
    if len(found) != 1 or not _names_flags(found[0]):
        return False
    return all(_name(call) in ADDING for call in _calls(found[0]) if _hands_on(call))


def _sources(name: str, script: ast.Module) -> Iterator[str]:
    """Modules from which the script imports a name."""
    for node in ast.walk(script):
        if isinstance(node, ast.ImportFrom) and node.module and any(each.name == name for each in node.names):
            yield node.module


def _hands_on(call: ast.Call) -> bool:
    """Whether a call adds a flag, or gives away what flags can be added to: any variable may be that."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return _name(call) in ADDING or any(isinstance(value, ast.Name | ast.Starred) for value in values)


def _names_flags(tree: ast.AST) -> bool:
    """Whether each flag that is added is spelled out."""
    added = [call for call in _calls(tree) if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return all(call.args and all(isinstance(each, ast.Constant) for each in call.args) for call in added)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_of_a_spec(call: ast.Call) -> bool:
    """Megatron's builders load a layer's specification so, long after the flags are parsed."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Attribute) and call.args[0].attr == "spec"
