#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the code is built: sizes, classes, imports, and the words of the docs. Prints one JSON object.

    python benchmarks/structure.py [--root DIR] [--details]

Counts what a reader has to hold in mind at once. Two counts go by names, because no type tells them yet, and are lower
bounds: `mode_branches` (tests of one of MODE_NAMES) and `untyped_messages` (a literal key looked up in one of
MESSAGE_NAMES). `--details` says where each maximum and each count is. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final

PACKAGE: Final = "megatron_resihp"
MODE_NAMES: Final = frozenset({"heterogeneous", "optimizer_is_shared_out", "shares_optimizer", "not_uniform"})
"""Names that code tests to find out whether Megatron's own groups can run the plan in force."""
MODE_MODULES: Final = ("integration/modes/", "control/replanning/modes.py")
MESSAGE_NAMES: Final = frozenset({"message", "notice", "answer", "request", "letter", "order", "event", "data"})
"""Names in the code for values from another process."""
PROTOCOL: Final = ("protocol/", "events/")
LONG_FUNCTION: Final = 50
LONG_LINE: Final = 120
FROZEN_BASES: Final = frozenset({"NamedTuple", "Enum", "IntEnum", "StrEnum", "Protocol", "TypedDict"})

EVENT_DECORATOR: Final = "event"
"""Makes a frozen dataclass of an event's class."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        path: from the package's folder, such as `control/node/agent.py`.
        name: as it is imported.
    """

    path: str
    name: str
    lines: int
    tree: ast.Module

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Found:
    """A number and where it comes from."""

    value: float
    where: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a checkout; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="of the checkout")
    parser.add_argument("--details", action="store_true", help="say where each number comes from")
    asked = parser.parse_args(argv)
    found = measure(asked.root)
    if asked.details:
        print(json.dumps({name: each.where for name, each in found.items() if each.where}, indent=1))
    print(json.dumps({name: each.value for name, each in found.items()}))
    return 0


def measure(root: Path) -> dict[str, Found]:
    """All figures of a checkout."""
    modules = [_module(root / PACKAGE, path) for path in sorted((root / PACKAGE).rglob("*.py"))]
    functions = [(module, each) for module in modules for each in ast.walk(module.tree) if isinstance(each, Function)]
    texts = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    lengths = [each.end_lineno - each.lineno + 1 for _, each in functions if each.end_lineno is not None]
    return {
        "modules_per_folder_max": _fullest_folder(root),
        "attributes_per_class_max": _largest_class(modules, _attributes),
        "methods_per_class_max": _largest_class(modules, _methods),
        "import_circles": _circles(modules),
        "mode_branches": _count(modules, MODE_MODULES, _mode_branches),
        "untyped_messages": _count(modules, PROTOCOL, _untyped_lookups),
        "functions_over_50_lines": _long_functions(functions),
        **_spread("module_lines", [module.lines for module in modules]),
        **_spread("function_lines", lengths),
        "typed_share": _share([_is_typed(each) for _, each in functions]),
        "public_docstring_share": _share(list(_documented(modules))),
        "sentence_words_median": Found(median([len(s.split()) for text in texts for s in _sentences(text)]), []),
        "doc_lines_over_120": _long_lines(texts),
    }


def _module(package: Path, path: Path) -> Module:
    text = path.read_text()
    relative = path.relative_to(package)
    words = [PACKAGE, *relative.with_suffix("").parts]
    name = ".".join(words[:-1] if words[-1] == "__init__" else words)
    return Module(str(relative), name, len(text.splitlines()), ast.parse(text))


# ---- folders and classes


def _fullest_folder(root: Path) -> Found:
    folders = Counter(path.parent for part in (PACKAGE, "tests/unit") for path in (root / part).rglob("*.py")
                      if path.name != "__init__.py")  # fmt: skip
    return _most({str(folder.relative_to(root)): count for folder, count in folders.items()})


def _largest_class(modules: Iterable[Module], count: Callable[[ast.ClassDef], int]) -> Found:
    classes = [(module, each) for module in modules for each in ast.walk(module.tree) if isinstance(each, ast.ClassDef)]
    return _most({f"{module}:{each.name}": count(each) for module, each in classes})


def _attributes(found: ast.ClassDef) -> int:
    """Names that methods assign on `self`, and fields of a dataclass that is not frozen."""
    names = {
        target.attr
        for target in ast.walk(found)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name) and target.value.id == "self"
    }  # fmt: skip
    if not _is_record(found):
        names |= {each.target.id for each in found.body
                  if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}  # fmt: skip
    return len(names)


def _is_record(found: ast.ClassDef) -> bool:
    """Whether its fields are frozen: of a record of flags, messages or events, however many there are."""
    bases = {base.id for base in found.bases if isinstance(base, ast.Name)}
    calls = [decorator for decorator in found.decorator_list if isinstance(decorator, ast.Call)]
    frozen = any(ast.unparse(word) == "frozen=True" for call in calls for word in call.keywords)
    events = any(ast.unparse(call.func) == EVENT_DECORATOR for call in calls)
    return frozen or events or bool(bases & FROZEN_BASES)


def _methods(found: ast.ClassDef) -> int:
    return sum(isinstance(each, Function) for each in found.body)


# ---- imports


def _circles(modules: Sequence[Module]) -> Found:
    """Sets of modules that import each other at import time or for type checking."""
    names = {module.name for module in modules}
    graph = {module.name: {name for name in _imports(module) if name in names} - {module.name} for module in modules}
    circles = [sorted(part) for part in _strongly_connected(graph) if len(part) > 1]
    return Found(len(circles), [" ".join(circle) for circle in circles])


def _imports(module: Module) -> Iterator[str]:
    for statement in _outside_functions(module.tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            # What is imported from a package may be a module of it.
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function):
            yield child
            yield from _outside_functions(child)


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return found


# ---- habits


def _count(
    modules: Iterable[Module], exempt: tuple[str, ...], find: Callable[[ast.Module], Iterator[ast.expr]]
) -> Found:
    counted = [module for module in modules if not module.path.startswith(exempt)]
    where = [f"{module}:{each.lineno}" for module in counted for each in find(module.tree)]
    return Found(len(where), where)


def _mode_branches(tree: ast.Module) -> Iterator[ast.expr]:
    """Conditions, of any form, that contain a name of the mode."""
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) else []
        if isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp):
            tests = [node.value]
        yield from (test for test in tests if any(_name_of(each) in MODE_NAMES for each in ast.walk(test)))


def _untyped_lookups(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_text(node.slice) and _name_of(node.value) in MESSAGE_NAMES:
            yield node
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
            and node.args and _is_text(node.args[0]) and _name_of(node.func.value) in MESSAGE_NAMES
        ):  # fmt: skip
            yield node


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# ---- functions


def _long_functions(functions: Iterable[tuple[Module, Function]]) -> Found:
    where = [f"{module}:{each.name}" for module, each in functions
             if each.end_lineno is not None and each.end_lineno - each.lineno >= LONG_FUNCTION]  # fmt: skip
    return Found(len(where), where)


def _is_typed(function: Function) -> bool:
    """Whether all parameters and the result have types."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    others = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    unbound = [each for each in named if each.arg not in ("self", "cls")]
    return function.returns is not None and all(each.annotation is not None for each in [*unbound, *others])


def _documented(modules: Iterable[Module]) -> Iterator[bool]:
    """For modules, and for public classes and functions at their top level."""
    for module in modules:
        yield ast.get_docstring(module.tree) is not None
        for each in module.tree.body:
            if isinstance(each, Function | ast.ClassDef) and not each.name.startswith("_"):
                yield ast.get_docstring(each) is not None


# ---- words


def _sentences(path: Path) -> Iterator[str]:
    """Sentences of running text: no code, no tables, no headings, no pictures."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith(("#", "|", "!", ">", "<")):
            paragraphs.append([])
            continue
        if re.match(r"([-*]|\d+\.) ", stripped):
            paragraphs.append([])
            stripped = re.sub(r"^([-*]|\d+\.) ", "", stripped)
        paragraphs[-1].append(stripped)
    for paragraph in paragraphs:
        yield from (sentence for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph)) if sentence)


def _long_lines(texts: Iterable[Path]) -> Found:
    where = [f"{text.name}:{number}" for text in texts for number, line in enumerate(text.read_text().splitlines(), 1)
             if len(line) > LONG_LINE and not line.startswith("|")]  # fmt: skip
    return Found(len(where), where)


# ---- figures


def _most(counts: dict[str, int]) -> Found:
    value = max(counts.values())
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return Found(value, [f"{where}: {count}" for where, count in ranked[:10]])


def _spread(name: str, values: Sequence[int]) -> dict[str, Found]:
    return {
        f"{name}_median": Found(median(values), []),
        f"{name}_p95": Found(round(quantiles(values, n=20)[-1]), []),
    }


def _share(flags: Sequence[bool]) -> Found:
    return Found(round(sum(flags) / len(flags), 4), [])


if __name__ == "__main__":
    sys.exit(main())
