# SPDX-License-Identifier: Apache-2.0
"""`resihp check`: asks what `resihp launch` would say of a job, without GPUs, data or the script itself.

May import: the standard library, `control.commands` and this package's modules. What needs torch or megatron is
imported only in `run`, so that the `resihp` command starts quickly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.launch import launch_options
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions, NoDeviceError
from megatron_resihp.control.node.environment import overruled, warnings_of
from megatron_resihp.control.transport.address import Address
from megatron_resihp.extras import missing

if TYPE_CHECKING:
    from megatron_resihp.integration.check.command_line import CommandLine
    from megatron_resihp.integration.check.findings import Findings
    from megatron_resihp.integration.check.losses import Outlook
    from megatron_resihp.integration.check.script import ScriptFlags

EPILOG: Final = f"""\
Give it the arguments of `resihp launch`. The exit code is 0 if the job would be accepted, and 2 if it would be
refused.

  resihp check --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... --resihp

{launch_options.EPILOG}"""
VOCABULARY: Final = 131_072
"""Rows that are counted where only the tokenizer knows how many there are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `resihp check`: those of `resihp launch`, and a few of its own."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="memory of each GPU: also says whether plans fit"
    )
    launch_options.add_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Say what is found; the exit code is 0 if the job would be let in, and otherwise 2."""
    try:
        options, uncounted = _asked(namespace)
        script = _script(options)
    except LaunchError as error:
        print(f"resihp: {error}", file=sys.stderr)
        return exit_codes.REFUSED
    sys.path.insert(0, str(script.resolve().parent) if options.module is None else os.getcwd())
    # The script may bring its own Megatron. None of it is imported before its version is known: a fork's may fail.
    from megatron_resihp.integration.enable import mismatch, version_problem
    from megatron_resihp.integration.patch import PatchError

    problem = version_problem()
    if problem is None and (lacking := missing(["megatron.core"])):
        print(f"resihp: {lacking}", file=sys.stderr)
        return exit_codes.REFUSED
    if problem is None:
        try:
            found = _looked(options, script, namespace.memory_gib, uncounted)
        except (ImportError, PatchError) as error:
            problem = mismatch(error)
    if problem is not None:
        found = _of_wrong_megatron(options, uncounted, problem)
    print(json.dumps(found.as_json(), indent=2) if namespace.json else "\n".join(found.lines()))
    return exit_codes.FINISHED if found.let_in else exit_codes.REFUSED


def _looked(options: LaunchOptions, script: Path, memory_gib: float | None, uncounted: str | None) -> Findings:
    """What there is to say of a job, with the stand-in in place."""
    from megatron_resihp import cpu

    with warnings.catch_warnings():
        # Megatron names each library that is not installed here.
        warnings.simplefilter("ignore")
        cpu.install(force=True)
        return look(options, script, memory_gib, uncounted=uncounted)


def _of_wrong_megatron(options: LaunchOptions, uncounted: str | None, problem: str) -> Findings:
    """What there is to say where Megatron is none that is supported."""
    from megatron_resihp.integration.check.findings import Findings

    stock = "to see what is said of the flags, give them to pretrain_gpt.py of a supported Megatron-LM"
    return Findings(_job(options, uncounted), refusals=(problem,), notes=(stock,))


def _job(options: LaunchOptions, uncounted: str | None) -> str:
    """What is asked about, in words."""
    size = options.size
    plural = "" if size.workers == 1 else "s"
    workers = f"{size.workers} worker{plural} ({size})" if uncounted is None else "an unknown number of workers"
    return f"{options.module or options.command[0]}, {workers}"


def _asked(namespace: argparse.Namespace) -> tuple[LaunchOptions, str | None]:
    """What is asked about, where nodes meet being of no matter yet; and why it isn't known how many workers there are.
    Then the options have a number that stands for it."""

    def count(word: str) -> int:
        # torchrun's auto falls back on CPUs, of which a login node has its own number.
        return launch_options.devices("gpu" if word == "auto" and not namespace.stand_in else word)

    uncounted = None
    try:
        options = launch_options.options_of(namespace, count_devices=count, is_here=lambda host: True)
    except NoDeviceError as error:
        uncounted = str(error)
        enough = max(namespace.min_workers, 1)
        options = launch_options.options_of(namespace, count_devices=lambda word: enough, is_here=lambda host: True)
    coordinator, run_dir = options.coordinator or Address("node0", 1), options.run_dir or options.runs
    launch_options.check(replace(options, coordinator=coordinator, run_dir=run_dir))
    return options, uncounted


def _script(options: LaunchOptions) -> Path:
    """The file that would be run."""
    if options.module is None:
        return Path(options.command[0])
    module = Path(*options.module.split("."))
    files = (module.with_suffix(".py"), module / "__main__.py")
    found = (Path(folder) / file for folder in (os.getcwd(), *sys.path) for file in files)
    return next((path for path in found if path.is_file()), files[0])


def look(
    options: LaunchOptions,
    script: Path,
    memory_gib: float | None,
    environment: Mapping[str, str] = os.environ,
    uncounted: str | None = None,
) -> Findings:
    """Everything that there is to say of a job. The stand-in is in place.

    Args:
        options: as for a launch.
        script: its text.
        memory_gib: of each device; None: unknown.
        environment: of the launcher.
        uncounted: why it isn't known how many workers there are; None: it is.
    """
    from megatron_resihp.integration.check.command_line import read_command_line
    from megatron_resihp.integration.check.findings import Findings
    from megatron_resihp.integration.check.script import read_script
    from megatron_resihp.integration.check.unknown import explained
    from megatron_resihp.integration.modes.overlaps import lost_always, lost_sometimes

    size = options.size
    text = read_script(script, [Path(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each])
    line = read_command_line(options.arguments, size.workers if uncounted is None else None, text.defaults)
    outlook, assumed, unplanned = _outlook(line, options, memory_gib)
    asked = {} if line.given is None else vars(line.given)
    return Findings(
        job=_job(options, uncounted),
        refusals=(*_refusals(line, text, uncounted), *unplanned),
        environment=(*overruled(environment), *warnings_of(environment)),
        given_up=tuple(lost_always(asked)),
        without_overlap=tuple(lost_sometimes(asked)),
        unknown=() if text.complete else tuple(_unknown(line, text, explained)),
        notes=(*_notes(line, options, text, environment), *assumed),
        outlook=outlook,
    )


def _refusals(line: CommandLine, text: ScriptFlags, uncounted: str | None) -> Iterator[str]:
    from megatron_resihp.integration.check.unknown import refusal

    if uncounted is not None:
        yield uncounted
    yield from line.refusals
    if text.complete:
        yield from _unknown(line, text, refusal)
    if _takes_flags_only(text):
        yield from _stray(line)
    if line.examined is not None:
        yield from line.examined.refusals


def _takes_flags_only(text: ScriptFlags) -> bool:
    return text.complete and not text.takes_words


def _stray(line: CommandLine) -> Iterator[str]:
    from megatron_resihp.integration.check.unknown import of_words

    return (of_words(flag, words) for flag, words in line.stray)


def _outlook(
    line: CommandLine, options: LaunchOptions, memory_gib: float | None
) -> tuple[Outlook | None, tuple[str, ...], tuple[str, ...]]:
    """What losses would do; what was assumed for that, or why it can't be told; and why there is no first plan."""
    if line.examined is None or line.examined.validated is None:
        return None, (), ()
    from megatron_resihp.integration.check.losses import outlook
    from megatron_resihp.integration.job import job_of
    from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
    from megatron_resihp.integration.patches.startup import describe_job, model_fields
    from megatron_resihp.plan import PlanError
    from megatron_resihp.planner import NoPlanError

    args: Any = line.examined.validated
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    fields, assumed = model_fields(args, options.stand_in), tuple[str, ...]()
    if not (fields["vocab_size"] or fields["padded_vocab_size"]):
        fields["vocab_size"] = VOCABULARY
        assumed = (f"the vocabulary is counted as {VOCABULARY:,} rows; only the tokenizer knows how many there are",)
    try:
        own = job_of(line.examined.config, args, DerivedArguments(lambda *_: None, args, {}), run="")
        job = describe_job(own, options.stand_in)
        job = replace(job, device_memory=memory, host_memory=None)
        return outlook(job, options.size, fields, options.min_workers), assumed, ()
    except NoPlanError as error:
        # The coordinator ends the job with it, as workers begin.
        return None, (), (f"{error}, so no plan exists at the start; change the sizes or the number of workers",)
    except PlanError as error:
        return None, (f"what losses would do can't be told: {error}",), ()


def _unknown(
    line: CommandLine, text: ScriptFlags, said: Callable[[str, list[str], Mapping[str, str]], str]
) -> list[str]:
    """What is said of each flag that neither Megatron nor the script's text has."""
    from megatron_resihp import config
    from megatron_resihp.integration.patches.arguments.flags import known_parser

    ours = config.add_arguments(argparse.ArgumentParser(add_help=False))
    known = [*known_parser()._option_string_actions, *ours._option_string_actions, *sorted(text.added)]
    flags = dict.fromkeys(word.partition("=")[0] for word in line.unknown if word.startswith("--"))
    return sorted(said(flag, known, _options()) for flag in flags.keys() - text.added)


def _options() -> dict[str, str]:
    """The options that stand before a script, and whose they are."""
    launch, check = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    launch_options.add_arguments(launch)
    add_arguments(check)
    return {
        **dict.fromkeys(check._option_string_actions, "resihp check"),
        **dict.fromkeys(launch._option_string_actions, "resihp launch"),
    }


def _notes(
    line: CommandLine, options: LaunchOptions, text: ScriptFlags, environment: Mapping[str, str]
) -> Iterator[str]:
    if line.unfinished is not None:
        yield f"how the sizes fit together is not checked: {line.unfinished}"
    if not _takes_flags_only(text):
        yield from (f"unless the script takes it: {said}" for said in _stray(line))
    if line.given is not None and not line.refusals:  # a flag that can't be read is not there either
        yield from _of_needs(line.given, text)
    if line.given is not None:
        yield from _of_flags(line.given, options, text, environment)
    if options.size.most_nodes > 1 and (options.coordinator is None or options.run_dir is None):
        yield "`resihp launch` needs --coordinator HOST:PORT and --run-dir DIR for several nodes"


def _of_needs(given: argparse.Namespace, text: ScriptFlags) -> Iterator[str]:
    from megatron_resihp.integration.check.needed import missing

    return missing(given, text.defaults)


def _of_flags(
    given: argparse.Namespace, options: LaunchOptions, text: ScriptFlags, environment: Mapping[str, str]
) -> Iterator[str]:
    from megatron_resihp.integration.check.elsewhere import not_seen, without_apex
    from megatron_resihp.integration.streams.seeds import draws

    yield from (f"not seen from here: {problem}" for problem in not_seen(given, text.defaults))
    if not options.stand_in:
        yield from without_apex(given)
    if not given.resihp:
        yield "--resihp is not among the flags: without it nothing is recovered; add it"
    yield from _of_connections(given, environment)
    if given.resihp and draws(given) and not given.resihp_megatron_random_streams:
        masks = "dropout masks and router noise are others than without --resihp"
        yield f"{masks}; --resihp-megatron-random-streams keeps Megatron's, but not through a failure"


def _of_connections(given: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """What Megatron asserts only where it sees a GPU of an older generation."""
    cut = max(given.tensor_model_parallel_size, given.context_parallel_size) > 1
    if given.overlap_moe_expert_parallel_comm:  # which is the faster the more connections there are
        return []
    if not cut or environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return []
    return ["Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with TP or CP on GPUs before Blackwell; set it there"]
