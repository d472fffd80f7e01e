#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Launch configurations that together have each pair of values of flags that few or no recipes have.

    python benchmarks/covering.py [--seed S] [--recipes FILE] > rows.json
    python benchmarks/recipes.py --recipes rows.json --results DIR

The flags are those of `recipe_runs/covering/factors.py`. Values that the plugin refuses are left out, and so
is Muon where its package is missing. A row that Megatron's own validation or the plugin refuses ends the program with
the reason: a constraint is lacking then.

Standard output has a JSON object a line for each row, as `recipes.py` reads it. The last line of standard error is one
JSON object: `rows`, `pairs` (that rows have), `infeasible` (pairs that constraints keep out, with the reason),
`refused_values` (that the plugin refuses, with the flags), and `without_a_factor`: flags whose evidence is a test and
that no row has. With `--recipes` flags of accepted configurations of that file are not counted there.

May import megatron, `recipe_runs` and `megatron_resihp`.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from acceptance import Answer, as_words, checker, read_recipes

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from recipe_runs.covering.factors import BASE, FACTORS, FORBIDDEN  # noqa: E402
from recipe_runs.covering.pairs import Array, Factors, Row, covering_array  # noqa: E402
from recipe_runs.environment import ENVIRONMENT, megatron_parser, spellings  # noqa: E402
from recipe_runs.shrinking.draft import read_options  # noqa: E402
from recipe_runs.shrinking.shrink import shrink  # noqa: E402
from recipe_runs.validate import refusal  # noqa: E402

Check = Callable[[str, Sequence[str]], Answer]
GROUP: Final = "covering"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the rows")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="configurations that are tried besides")
    namespace = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from megatron_resihp import cpu

    cpu.install(force=True)
    others = read_recipes(namespace.recipes.read_text()) if namespace.recipes else []
    with contextlib.redirect_stdout(sys.stderr):  # which Megatron writes to
        check = checker()
        refused = refused_values(check)
        array = covering_array(allowed_factors(refused), FORBIDDEN, namespace.seed)
        recipes = [{"name": name_of(row), "group": GROUP, "args": words_of(row)} for row in array.rows]
        reasons = problems(recipes)
        accepted = [recipe for recipe in others if check(recipe["name"], recipe["args"]).accepted]
        left = without_a_factor([*recipes, *accepted])
    if reasons:
        print(*reasons, sep="\n", file=sys.stderr)
        return 1
    print(*map(json.dumps, recipes), sep="\n")
    print(json.dumps(summary(array, refused, left)), file=sys.stderr)
    return 0


def refused_values(check: Check) -> dict[str, tuple[str, ...]]:
    """The flags that the plugin refuses, by value; or the package that Megatron lacks here."""
    answers = {
        f"{factor}: {value}": check(value, [*BASE.split(), *words.split()])
        for factor, values in FACTORS.items()
        for value, words in values.items()
    }
    unparsable = [f"{name}: {answer.unparsable}" for name, answer in answers.items() if answer.unparsable]
    assert not unparsable, unparsable
    refused = {name: answer.refused for name, answer in answers.items() if answer.refused}
    if importlib.util.find_spec("emerging_optimizers") is None:
        refused["optimizer: muon"] = ("emerging-optimizers is not installed",)
    return refused


def allowed_factors(refused: Mapping[str, Sequence[str]]) -> Factors:
    return {
        factor: [value for value in values if f"{factor}: {value}" not in refused] for factor, values in FACTORS.items()
    }


def words_of(row: Row) -> list[str]:
    return [*BASE.split(), *(word for factor, value in row.items() for word in FACTORS[factor][value].split())]


def name_of(row: Row) -> str:
    """What differs from the plainest row."""
    return ", ".join(value for factor, value in row.items() if value != next(iter(FACTORS[factor]))) or "plain"


def problems(recipes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why rows could not be run."""
    parser = megatron_parser()
    names = spellings(parser)
    found = []
    for recipe in recipes:
        shrunk = shrink(recipe["args"], names)
        reasons = [*shrunk.lost, refusal(shrunk, parser)]
        found += [f"{recipe['name']}: {reason}" for reason in reasons if reason]
    return found


def without_a_factor(recipes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Supported flags whose evidence is a test, which no recipe has."""
    from megatron_resihp.integration.support import TABLE, Evidence

    parser = megatron_parser()
    names = spellings(parser)
    tried = {flag for recipe in recipes for flag in read_options(as_words(recipe["args"]), names)}
    dests = {action.dest for action in parser._actions if tried & set(action.option_strings)}
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    return sorted(flags[row.name] for row in TABLE.values() if row.evidence is Evidence.TEST and row.name not in dests)


def summary(array: Array, refused: Mapping[str, Sequence[str]], left: Sequence[str]) -> dict[str, Any]:
    whys = {
        " with ".join(f"{factor}: {value}" for factor, value in pair): [
            forbidden.why for forbidden in FORBIDDEN if forbidden.meets(dict(pair))
        ]
        for pair in array.infeasible
    }
    return {
        "rows": len(array.rows),
        "pairs": array.covered,
        "infeasible": whys,
        "refused_values": refused,
        "without_a_factor": left,
    }


if __name__ == "__main__":
    sys.exit(main())
