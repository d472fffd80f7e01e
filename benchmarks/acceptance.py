#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many real launch configurations --resihp lets in, and which of Megatron's flags keep the others out.

    python benchmarks/acceptance.py --recipes FILE [--details]

FILE is a JSON list, or has one JSON object a line: `name`, `group`, and `args` as on the command line. Configurations
of hybrid models (group `official_hybrid`) are left out. Only flags are checked, not how sizes fit together.

The last line of standard output is one JSON object: `recipes`, `accepted`, `share`, `unparsable` (Megatron's own parser
refuses these), `refused_by` (flag → configurations that have it), `refused_by_alone` (those that have no other) and
`only_unknown` (configurations that only flags unknown to Megatron's parser keep out).

May import megatron and `megatron_resihp`.
"""

import argparse
import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

LEFT_OUT = "official_hybrid"
LIST = re.compile(r"\[[^\[\],]*\]")
ONE_TEXT = ("--step-batch-size-schedule",)


@dataclass(frozen=True)
class Answer:
    """What becomes of one configuration.

    Attributes:
        name: of the configuration.
        refused: flags that are not supported, as spelled; empty: it is accepted.
        unknown: those of them that Megatron's parser doesn't have.
        unparsable: why Megatron's parser refuses it; empty: it doesn't.
    """

    name: str
    refused: tuple[str, ...] = ()
    unparsable: str = ""
    unknown: frozenset[str] = frozenset()

    @property
    def accepted(self) -> bool:
        return not self.refused and not self.unparsable


def read_recipes(text: str) -> list[Mapping[str, Any]]:
    """The configurations of a file, without hybrid models."""
    stripped = text.lstrip()
    found = json.loads(text) if stripped.startswith("[") else [json.loads(line) for line in text.splitlines() if line]
    return [recipe for recipe in found if recipe.get("group") != LEFT_OUT]


def as_words(args: Iterable[str]) -> list[str]:
    """Arguments as Megatron's test harness hands them on: it writes several values as one, `[a b]`. A list of numbers
    with commas, such as `[0,1]`, and a sum of lists are one value of Megatron's own."""
    return [word for each in args for word in (each[1:-1].split() if LIST.fullmatch(each) else [each])]


def quoted(words: Iterable[str]) -> list[str]:
    """The same, with the values of a flag that takes one text as one word again: FILE has lost the quotes around it."""
    found: list[str] = []
    open_text = False
    for word in words:
        if word.startswith("--"):
            open_text = word in ONE_TEXT
        elif open_text and not found[-1].startswith("--"):
            found[-1] += f" {word}"
            continue
        found.append(word)
    return found


def filled_in(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The same, with a number in the place of each shell variable that stands for one, and of each value that FILE has
    lost: what a shell script takes from its own command line is nothing there."""
    numbers = {flag for action in parser._actions if action.type in (int, float) for flag in action.option_strings}
    valued = {flag for action in parser._actions if action.nargs in (None, "+") for flag in action.option_strings}
    found: list[str] = []
    for flag, word in pairwise(["", *words, "--"]):
        if flag in valued and word.startswith("--"):
            found.append("1")
        found.append("1" if flag in numbers and "$" in word else word)
    return found[:-1]


def checker() -> Callable[[str, Sequence[str]], Answer]:
    """Checks the arguments of a configuration against Megatron's parser and what --resihp supports."""
    from megatron.training import arguments

    from megatron_resihp.integration.patches.arguments import flags
    from megatron_resihp.integration.support import refusals

    add = flags.wrap_add_megatron_arguments(arguments.add_megatron_arguments)
    parser = add(argparse.ArgumentParser(allow_abbrev=False))
    defaults = vars(parser.parse_args([]))
    spelled = {action.dest: action.option_strings[0] for action in parser._actions}

    def check(name: str, args: Sequence[str]) -> Answer:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                values, unknown = parser.parse_known_args(filled_in(quoted(as_words(args)), parser))
        except (SystemExit, KeyError, ValueError) as error:
            return Answer(name, unparsable=(said.getvalue().splitlines() or [str(error)])[-1])
        refused = {line.split()[0] for line in refusals(vars(values), defaults, spelled)}
        others = frozenset(word for word in unknown if word.startswith("--"))
        return Answer(name, tuple(sorted(refused | others)), unknown=others)

    return check


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """The figures of the module's docstring."""
    accepted = sum(answer.accepted for answer in answers)
    alone = Counter(answer.refused[0] for answer in answers if len(answer.refused) == 1)
    return {
        "recipes": len(answers),
        "accepted": accepted,
        "share": round(accepted / max(len(answers), 1), 4),
        "unparsable": sum(bool(answer.unparsable) for answer in answers),
        "refused_by": dict(Counter(flag for answer in answers for flag in answer.refused).most_common()),
        "refused_by_alone": dict(alone.most_common()),
        "only_unknown": sum(bool(answer.refused) and answer.unknown >= {*answer.refused} for answer in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=Path, required=True, metavar="FILE")
    parser.add_argument("--details", action="store_true", help="a line for each configuration")
    namespace = parser.parse_args()
    check = checker()
    answers = [check(recipe["name"], recipe["args"]) for recipe in read_recipes(namespace.recipes.read_text())]
    for answer in answers if namespace.details else ():
        print(f"{answer.name}: {answer.unparsable or ' '.join(answer.refused) or 'accepted'}")
    print(json.dumps(summary(answers)))


if __name__ == "__main__":
    main()
