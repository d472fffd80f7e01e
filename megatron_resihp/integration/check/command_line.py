# SPDX-License-Identifier: Apache-2.0
"""A command line as a worker would read it: parsed and validated by Megatron itself, in this process.

The stand-in is in place before, so that no GPU is needed. May import megatron and this package.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron.training import arguments

from megatron_resihp.config import ResihpConfig
from megatron_resihp.integration.patch import Patch, apply_all, undo_all
from megatron_resihp.integration.patches.arguments.flags import (
    YAML,
    Examined,
    examine,
    give_up_overlaps,
    reads_yaml,
    unsupported,
    with_defaults,
    wrap_add_megatron_arguments,
)


@dataclass(frozen=True)
class CommandLine:
    """Attributes:
    examined: by the checks that each worker makes; None: Megatron's parser can't read it.
    given: Megatron's arguments as parsed, before others were derived from them.
    unknown: words that Megatron's parser does not know.
    refusals: of Megatron's parser.
    unfinished: why Megatron's own validation was not done here.
    stray: words that no flag takes, each after a flag of Megatron's, or after none.
    """

    examined: Examined | None
    given: argparse.Namespace | None
    unknown: tuple[str, ...]
    refusals: tuple[str, ...]
    unfinished: str | None = None
    stray: tuple[tuple[str, tuple[str, ...]], ...] = ()


def read_command_line(words: Sequence[str], workers: int | None, defaults: Mapping[str, Any]) -> CommandLine:
    """Parse and validate a script's arguments.

    Args:
        words: what follows the script.
        workers: of the job; None: how many is not known, and sizes are not checked.
        defaults: the script's own, see `script`.
    """
    if reads_yaml(words):
        return CommandLine(None, None, (), (YAML,))
    ours = Patch(
        "megatron.training.arguments:add_megatron_arguments", wrap_add_megatron_arguments, ("parser",), "adds --resihp*"
    )
    apply_all([ours])
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
            readable, unknown, refusals = _readable(words, parser)
            if readable is None:
                return CommandLine(None, None, (), tuple(refusals))
            with _as_worker_0(readable, workers or 1):
                args = arguments.parse_args(ignore_unknown_args=True)
                args.world_size = workers
                given = argparse.Namespace(**vars(args))
                examined, unfinished = _examined(args, dict(defaults))
    except SystemExit:
        last = (said.getvalue().splitlines() or ["--help is among the flags"])[-1]
        return CommandLine(None, None, (), (f"Megatron's parser ends the script: {last}; fix that",))
    finally:
        undo_all([ours])
    return CommandLine(
        examined, given, tuple(unknown), tuple(refusals), unfinished, tuple(_stray(readable, unknown, parser))
    )


def _examined(args: argparse.Namespace, defaults: dict[str, Any]) -> tuple[Examined, str | None]:
    if args.use_checkpoint_args or defaults.get("use_checkpoint_args"):
        examined = Examined(ResihpConfig.from_namespace(args), tuple(unsupported(with_defaults(args, defaults))), None)
        return examined, "sizes are in the checkpoint (--use-checkpoint-args), which is not read here"
    give_up_overlaps(args)
    try:
        return examine(arguments.validate_args, args, defaults), None
    except Exception as error:
        problem = f"Megatron's own validation fails: {type(error).__name__}: {error}; fix that"
        return Examined(ResihpConfig.from_namespace(args), (problem,), None), None


def _readable(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str] | None, list[str], list[str]]:
    """The words without those that Megatron's parser can't read, or None where that doesn't help; the unknown ones;
    and what is wrong with the rest."""
    left, refusals = list(words), list[str]()
    while True:
        try:
            _, unknown = parser.parse_known_args(left)
            return left, unknown, refusals
        except argparse.ArgumentError as error:
            flags = (error.argument_name or "").split("/")
            wrong = f"{error.argument_name}: {error.message}"
            values = [given for flag, _, given in _pairs(left) if flag in flags]
        except (KeyError, ValueError) as error:
            # Some of Megatron's flags look their values up in enumerations.
            value = error.args[0] if error.args else None
            flags = [flag for flag, _, given in _pairs(left) if given == value][:1]
            wrong = f"{' '.join(flags)} {value}: no such value".lstrip()
            values = [str(value)]
        refusals.append(f"{wrong}; {_mend(values)}")
        fewer = _without(left, flags)
        if len(fewer) == len(left):
            return None, [], refusals
        left = fewer


def _mend(values: Sequence[str]) -> str:
    """What to do about values of a flag that Megatron's parser can't read."""
    if "" in values:
        return "an empty word: an unset shell variable?"
    if any(len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" for value in values):
        return "remove the quotes inside of the quotes"
    return "see Megatron's --help"


def _stray(
    words: Sequence[str], unknown: Sequence[str], parser: argparse.ArgumentParser
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Words that no flag takes. Those after a flag that the parser doesn't know may be that one's values."""
    if all(word.startswith("--") for word in unknown):
        return
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    if before := tuple(words[: starts[0] if starts else None]):
        yield "", before
    for start, end in pairwise([*starts, len(words)]):
        try:
            _, left = parser.parse_known_args(words[start:end])
        except (argparse.ArgumentError, KeyError, ValueError):
            continue  # Its value begins like a flag.
        if left and left[0] != words[start]:
            yield words[start].partition("=")[0], tuple(left)


def _pairs(words: Sequence[str]) -> list[tuple[str, str, str]]:
    """Flags with the value that follows each, or is part of the same word."""
    following = [*words[1:], ""]
    return [
        word.partition("=") if "=" in word else (word, "", after) for word, after in zip(words, following, strict=True)
    ]


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words without these flags and what belongs to them."""
    left: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            left.append(word)
    return left


@contextlib.contextmanager
def _as_worker_0(words: Sequence[str], workers: int) -> Iterator[None]:
    """Let Megatron find what it looks for in the process of a job's first worker."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = ["resihp check", *words]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(workers))
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
