# SPDX-License-Identifier: Apache-2.0
"""The whole table, and what it refuses of a command line. Imports this package's rows: no torch, no Megatron."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_resihp.integration.support.row import Row
from megatron_resihp.integration.support.rows import (
    attention,
    checkpoints,
    data,
    elsewhere,
    experts,
    model,
    parallelism,
    precision,
    reporting,
    training,
)

SUBJECTS: Mapping[str, tuple[Row, ...]] = {
    "Parallelism and overlap": parallelism.ROWS,
    "Model": model.ROWS,
    "Attention and positions": attention.ROWS,
    "Experts": experts.ROWS,
    "Precision": precision.ROWS,
    "Training, optimizer and learning rate": training.ROWS,
    "Data and tokenizer": data.ROWS,
    "Checkpoints and the job's end": checkpoints.ROWS,
    "Logging and profiling": reporting.ROWS,
    "Other kinds of jobs": elsewhere.ROWS,
}
"""All rows by subject, in the order of docs/megatron-flags.md."""


def by_name(groups: Iterable[Iterable[Row]]) -> dict[str, Row]:
    """Rows by the argument's name.

    Raises:
        ValueError: an argument has two rows.
    """
    table: dict[str, Row] = {}
    for row in (row for group in groups for row in group):
        if row.name in table:
            raise ValueError(f"{row.name} has two rows")
        table[row.name] = row
    return table


TABLE: Mapping[str, Row] = by_name(SUBJECTS.values())
SUPPORTED: frozenset[str] = frozenset(name for name, row in TABLE.items() if row.supported)
GIVEN_UP: Mapping[str, str] = {name: row.given_up for name, row in TABLE.items() if row.given_up}
"""Overlaps that no job with --resihp has, and why."""
UNKNOWN = "nobody has yet read what it does"


def refusals(values: Mapping[str, Any], defaults: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    """One line for each argument that is not known to work. A line's first word is the flag.

    Args:
        values: the arguments as parsed, before Megatron derives others from them.
        defaults: Megatron's defaults.
        flags: how each argument is spelled on the command line.
    """
    complete = {**defaults, **values}
    instead = "leave out this flag or --resihp"
    rows = (TABLE.get(name) or Row(name, why=UNKNOWN, instead=instead) for name in sorted(defaults))
    return [line for row in rows if (line := row.refusal(complete, defaults, flags))]
