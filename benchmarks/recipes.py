#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether accepted launch configurations train the same through a death as stock Megatron does without one.

    python benchmarks/recipes.py --recipes FILE [--sample N] [--seed S] [--part I/N] [--results DIR]

FILE is that of `acceptance.py`; only what it accepts is tried. A recipe is shrunk by hand-written rules
(`recipe_runs/shrinking`): layers, widths, experts, vocabulary, sequence and batch become smaller, parallel sizes fit
8 workers, of which two replicas, and the schedule has 12 iterations. All other flags stay. Kernels that only GPUs have,
data and tokenizers are replaced; `--dry-run` names each replacement. Recipes that shrink to the same command line run
once. Each then runs on CPUs, with workers that are forked from one warm process:

- stock Megatron without the plugin;
- the same with `--lr 0`, the negative control: its loss must differ by 1 %, and by 100 times what is tolerated;
- in 16 bits: stock Megatron with another degree of tensor parallelism, whose differences are tolerated, the loss's up
  to the control's hundredth, and numbers of zeros besides as far as chance goes (`recipe_runs/counts.py`). Where
  workers share experts and that is not enough, a run without sharing says by how much more zeros may differ;
- with `--resihp`: a worker gets a SIGKILL at a random point, the survivors change to two replicas that differ in
  stages, degrees and shares, and then the dead worker returns. Survivors of a job with context parallelism, which runs
  uniform plans only, change to the fewest replicas that share sequences as in the job's own layout.

Every number that Megatron would write to TensorBoard (losses, norms, zeros, rates, evaluations), on any worker and in
any attempt, is compared unrounded: at most 1e-5 relatively in fp32. Times and memory are left out.

The last line of standard output is one JSON object: `recipes`, `accepted`, `distinct` (command lines); of the recipes
`trained` (all runs ended well), `equal`, `kernel_replaced` (equal, but some kernel of theirs needs a GPU), `not_tried`
(not in this part or sample), and with reasons `not_run_on_cpu`, `failed`, `no_control`, `unequal`.

May import megatron (in the parser only), the integration tests' jobs and `megatron_resihp`.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from acceptance import as_words, checker, read_recipes
from common import add_part, of_part

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "integration")]

from recipe_runs.environment import ENVIRONMENT, megatron_parser, spellings  # noqa: E402
from recipe_runs.results import Line, Results, lines_of, summary  # noqa: E402
from recipe_runs.shrinking.draft import read_options  # noqa: E402
from recipe_runs.shrinking.shrink import shrink  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sample", type=int, metavar="N", help="so many command lines, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of deaths and of the sample")
    add_part(parser)
    parser.add_argument("--results", type=Path, metavar="DIR", help="keeps verdicts: what is there is not run again")
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="NAME", help="leave out these flags, which have no -- here"
    )
    parser.add_argument("--names", nargs="+", metavar="WORD", help="only recipes whose name has one of these words")
    parser.add_argument("--dry-run", action="store_true", help="show what each command line would be")
    namespace = parser.parse_args()
    recipes = [
        {**recipe, "args": without(as_words(recipe["args"]), namespace.without)}
        for recipe in read_recipes(namespace.recipes.read_text())
    ]
    check, names = checker(), spellings(megatron_parser())
    accepted = [recipe for recipe in recipes if check(recipe["name"], recipe["args"]).accepted]
    lines = lines_of((recipe["name"], shrink(recipe["args"], names)) for recipe in accepted)
    chosen = choose(lines, namespace)
    if namespace.dry_run:
        for line in chosen:
            show(line)
    with ExitStack() as stack:
        directory = namespace.results or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = Results(directory, namespace.seed)
        if not namespace.dry_run:
            try_all([line for line in chosen if not results.read(line)], results, namespace.seed)
        found: dict[str, Any] = summary(len(recipes), len(accepted), lines, results)
        print(json.dumps(({"without": namespace.without} if namespace.without else {}) | found), flush=True)


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without these flags."""
    options = read_options(words, {})
    return [word for flag, values in options.items() if flag[2:] not in flags for word in (flag, *values)]


def choose(lines: Sequence[Line], namespace: argparse.Namespace) -> list[Line]:
    """The lines of the part, of the sample, that can be run."""
    runnable = [line for line in lines if not line.shrunk.lost]
    if namespace.names:
        runnable = [line for line in runnable if any(word in name for word in namespace.names for name in line.names)]
    if namespace.sample is not None:
        sample = Random(namespace.seed).sample(range(len(runnable)), min(namespace.sample, len(runnable)))
        runnable = [runnable[number] for number in sorted(sample)]
    return of_part(runnable, namespace.part)


def show(line: Line) -> None:
    print(*line.names, sep="\n")
    print(f"  {line.shrunk.workers} workers:", *line.shrunk.words)
    for what in (*line.shrunk.kernels, *line.shrunk.replaced):
        print(f"  {what}")


def try_all(lines: Sequence[Line], results: Results, seed: int) -> None:
    from jobs import Nursery
    from recipe_runs.runs import SCRIPT, Runner
    from recipe_runs.trial import Trial

    if not lines:
        return
    os.environ.update(ENVIRONMENT)
    nursery = Nursery(SCRIPT)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for number, line in enumerate(lines, 1):
                runner = Runner(nursery, Path(directory))
                verdict = Trial(runner, line.shrunk, Random(f"{seed}/{line.key}")).verdict()
                results.write(line, verdict)
                seconds = sum((verdict.seconds or {}).values())
                print(f"{number}/{len(lines)} {line.names[0]}: {verdict.outcome} {verdict.reason} ({seconds:.0f} s)")
                sys.stdout.flush()
    finally:
        nursery.close()


if __name__ == "__main__":
    main()
