#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether Megatron accepts the command lines that recipes shrink to: its parser and its validation, no training.

    python benchmarks/recipe_runs/validate.py FILE

FILE is that of `benchmarks/recipes.py`; recipes that the plugin doesn't accept are here too. The last line of standard
output is one JSON object: `recipes`, `distinct` (command lines), `refused` (why, by name). Imports megatron.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from acceptance import as_words, read_recipes  # noqa: E402

from recipe_runs.environment import ENVIRONMENT, megatron_parser, spellings  # noqa: E402
from recipe_runs.shrinking.shrink import Shrunk, shrink  # noqa: E402


def main() -> None:
    os.environ.update(ENVIRONMENT)
    from megatron_resihp import cpu

    cpu.install(force=True)
    parser = megatron_parser()
    names = spellings(parser)
    recipes = read_recipes(Path(sys.argv[1]).read_text())
    shrunk = {recipe["name"]: shrink(as_words(recipe["args"]), names) for recipe in recipes}
    refused = {name: why for name, each in shrunk.items() if (why := refusal(each, parser))}
    distinct = len({(each.workers, each.words) for each in shrunk.values()})
    print(json.dumps({"recipes": len(recipes), "distinct": distinct, "refused": refused}))


def refusal(shrunk: Shrunk, parser: argparse.ArgumentParser) -> str:
    """Why Megatron refuses a command line; empty: it doesn't."""
    from megatron.training import argument_utils, arguments

    from megatron_resihp.integration import releases

    configures = releases.current().configures_models
    configure = argument_utils.gpt_config_from_args if configures else argument_utils.core_transformer_config_from_args
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = parser.parse_args(shrunk.in_directory("/tmp"))
            args.rank, args.world_size, args.local_rank = 0, shrunk.workers, 0
            arguments.validate_args(args)
            configure(args)
    except SystemExit:
        return (said.getvalue().splitlines() or ["it says nothing"])[-1]
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        # Some of Megatron's assertions say nothing.
        return str(error) or traceback.extract_tb(error.__traceback__)[-1].line or repr(error)
    return ""


if __name__ == "__main__":
    main()
