# SPDX-License-Identifier: Apache-2.0
"""docs/megatron-flags.md, from the support table.

`python -m megatron_resihp.integration.support.page > docs/megatron-flags.md` writes the page anew.
May import megatron, whose parser says how arguments are spelled, and this package.
"""

import argparse
import itertools
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final

from megatron_resihp.integration.support.lacking import LACKING
from megatron_resihp.integration.support.row import Row
from megatron_resihp.integration.support.table import SUBJECTS, TABLE

RELEASE: Final = "0.19"
"""The page is about this one and says where the others differ; it has to be written with this one installed."""


def spelled() -> dict[str, str]:
    """How the installed Megatron spells each of its arguments."""
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    return {action.dest: action.option_strings[0] for action in parser._actions}


def markdown(flags: Mapping[str, str]) -> str:
    """docs/megatron-flags.md.

    Args:
        flags: how each argument of `RELEASE` is spelled.
    """
    described = [row for row in TABLE.values() if row.name in flags]
    supported = sum(row.supported for row in described)
    parts = [_INTRODUCTION.format(release=RELEASE, total=len(described), supported=supported)]
    for subject, rows in SUBJECTS.items():
        known = [row for row in rows if row.name in flags]
        parts += [f"## {subject}\n", _supported(known, flags), _refused(known, flags)]
    return "\n".join(part for part in [*parts, _others(flags)] if part)


def _others(flags: Mapping[str, str]) -> str:
    """What other releases lack, and what only they have."""
    parts = ["## Other releases\n"]
    for release in sorted(LACKING.keys() - {RELEASE}):
        lacking = ", ".join(f"`{flags[name]}`" for name in sorted(LACKING[release] & flags.keys()))
        more = ", ".join(f"`--{name.replace('_', '-')}`" for name in sorted(LACKING[RELEASE] - LACKING[release]))
        besides = f"Megatron {release} also has {more}, which do nothing without a flag that is refused."
        parts += [_filled(f"Megatron {release} lacks {lacking}."), _filled(besides)]
    return "\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, width=120, break_on_hyphens=False) + "\n"


def _supported(rows: Iterable[Row], flags: Mapping[str, str]) -> str:
    return _table(
        ["flags", "evidence", "where", "only"],
        ((row.evidence or "", _shown(row, flags), _conditions(row, flags), row) for row in rows if row.supported),
        flags,
    )


def _shown(row: Row, flags: Mapping[str, str]) -> str:
    if row.unread:
        said = f"nothing reads it; `{row.shown}` adds it"
    else:
        other, _, value = row.without.partition("=")
        said = f"`{row.shown}`" + (f"; nothing without `{f'{flags[other]} {value}'.strip()}`" if other else "")
    return said + (f"; in 0.18 `{row.shown_in_018}`" if row.shown_in_018 else "")


def _conditions(row: Row, flags: Mapping[str, str]) -> str:
    said = [row.condition.said(flags)] if row.condition else []
    needed = [f"has to be given: {row.needed}"] if row.needed else []
    given_up = [f"the job runs without this overlap: {row.given_up}"] if row.given_up else []
    return "; ".join([*said, *needed, *given_up, *([row.device] if row.device else [])])


def _refused(rows: Iterable[Row], flags: Mapping[str, str]) -> str:
    return _table(
        ["refused", "why", "instead"], ((row.why, row.instead, row) for row in rows if not row.supported), flags
    )


def _table(heads: list[str], lines: Iterable[tuple[Any, ...]], flags: Mapping[str, str]) -> str:
    """Lines end with their row. Rows beside each other that say the same are one line."""
    texts = []
    for said, same in itertools.groupby(lines, key=lambda line: line[:-1]):
        names = ", ".join(f"`{flags[line[-1].name]}`" for line in same)
        texts.append("| " + " | ".join([names, *said]) + " |")
    if not texts:
        return ""
    return "\n".join([f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *texts, ""])


_INTRODUCTION: Final = """\
# Megatron's flags

<!-- Written by `python -m megatron_resihp.integration.support.page`; edit integration/support/rows/ instead. -->

These are Megatron-LM {release}'s {total} arguments. With `--resihp`, {supported} of them may have any value, or those
that the last column allows. The others are refused at the start if they differ from Megatron's default. A flag that is
new to Megatron is refused until it has a row here. For each supported flag there is evidence of one of four kinds:

- `inert`: it changes nothing that training computes. The place in Megatron shows it. Many flags do nothing because
  another flag that they belong to is refused, or is for an overlap that jobs do without.
- `start`: it is read before the first step, at that place in Megatron, and says what the job begins with: its data, its
  words, its first weights. A recovery goes on from what survivors hold, and does not look at it. A worker that
  comes back reads it as the first ones did.
- `kernel`: it changes how something is computed, at that place in Megatron. It changes no state, groups, schedule,
  random streams or number of collectives.
- `test`: that test trains with it, through a death or a change of plan if it matters after the start. One below
  `tests/unit` holds what CPUs can show of a flag that only GPUs have.
"""


if __name__ == "__main__":
    print(markdown(spelled()), end="")
