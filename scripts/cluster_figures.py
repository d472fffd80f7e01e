# SPDX-License-Identifier: Apache-2.0
"""Prints what scripts/cluster_tests.sh has found, from pytest's results, as one JSON object.

- `cases` that ran, and how many of them `failed`;
- `node0_next_step_s`: from the loss of node 0 and the coordinator to the next iteration, less a lease;
- `chaos_sequences`, how many of them broke the contract (`chaos_violations`), and `chaos_longest_silence_s`, the
  longest time in any of them without a step;
- `checker_states`: distinct states of the largest exhaustive search of the agreement;
- `attacks` by strangers, and `attacks_succeeded`;
- `new_plan_10000_s`: from the word of a death to the published plan, in a job of 10,000 synthetic workers.

Exit code 1: nothing ran. Imports the standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Final
from xml.etree import ElementTree

ATTACKS: Final = ("test_attacks", "test_strangers")
CHAOS: Final = "test_control_chaos"


def main(results: str) -> int:
    """Print the figures; returns the exit code. `results`: pytest's file in JUnit's format."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    if len(ran) < len(cases):
        print(f"{len(cases) - len(ran)} left out: a program is missing, or this is not root", file=sys.stderr)
    attacks, chaos = (_of(ran, *names) for names in (ATTACKS, (CHAOS,)))
    found: dict[str, Any] = {
        "cases": len(ran), "failed": _failed(ran), "chaos_sequences": len(chaos), "chaos_violations": _failed(chaos),
        "attacks": len(attacks), "attacks_succeeded": _failed(attacks),
    }  # fmt: skip
    for name in ("node0_next_step_s", "chaos_longest_silence_s", "checker_states", "new_plan_10000_s"):
        figures = list(_figures(ran, name))
        found[name] = max(figures) if figures else None
    print(json.dumps(found))
    return 0 if ran else 1


def _of(cases: list[ElementTree.Element], *modules: str) -> list[ElementTree.Element]:
    return [case for case in cases if any(f".{module}" in case.get("classname", "") for module in modules)]


def _failed(cases: list[ElementTree.Element]) -> int:
    return sum(case.find("failure") is not None or case.find("error") is not None for case in cases)


def _figures(cases: list[ElementTree.Element], name: str) -> Iterator[float]:
    """What tests have recorded under this name."""
    for case in cases:
        for found in case.iter("property"):
            if found.get("name") == name:
                yield float(found.get("value", "nan"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
