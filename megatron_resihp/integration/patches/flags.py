# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's argument parser. Adds the --resihp* flags and validates them together with Megatron's.

Replaces add_megatron_arguments and validate_args in megatron.training.arguments.
"""

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_resihp import cpu
from megatron_resihp.config import ConfigError, ResihpConfig, add_arguments
from megatron_resihp.control import exit_codes
from megatron_resihp.control.node.environment import MAX_RESTARTS, SLOTS, give_back_nccl
from megatron_resihp.control.replanning.change import ChangeRefused, plan_of
from megatron_resihp.control.worker.identity import Identity
from megatron_resihp.cost.profile import ProfileError, load_profile
from megatron_resihp.integration.patches.derived_arguments import DerivedArguments
from megatron_resihp.integration.patches.identity import identity_of
from megatron_resihp.integration.patches.support import refusals
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.files import read_plan

SwitchOn = Callable[[ResihpConfig, DerivedArguments, Callable[[], Identity]], None]
"""Called with our flags, what Megatron derives for other degrees, and what finds out with what this one was started."""

_parser: argparse.ArgumentParser | None = None


def wrap_add_megatron_arguments(
    original: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """Megatron's arguments, then ours; keeps Megatron's defaults to compare with."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        global _parser
        _parser = argparse.ArgumentParser(add_help=False)
        original(_parser)
        _mend_help(original(parser))
        return add_arguments(parser)

    return add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Some of Megatron 0.19's help texts hold a bare '%', on which argparse's --help ends with an error."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            if action.help:
                formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def make_wrap_validate_args(switch_on: SwitchOn) -> Callable[[Any], Any]:
    """Validation that refuses what is not known to work and, with --resihp, switches the plugin on."""

    def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
            if not args.resihp:
                give_back_nccl()
                return original(args, defaults)
            config = _checked(args)
            derived = DerivedArguments(original, args, defaults)
            given = {**vars(args), **{name: value for name, value in defaults.items() if vars(args).get(name) is None}}
            result = _megatron_validates(original, args, defaults)
            _check_batches(args)
            _check_evaluation(args)
            _check_data(args)
            switch_on(config, derived, functools.partial(identity_of, given, _known_parser()._actions))
            return result

        return validate_args

    return wrap_validate_args


def _megatron_validates(original: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any]) -> Any:
    """Megatron's own validation, what it asserts said in one line instead of a traceback."""
    try:
        return original(args, defaults)
    except AssertionError as error:
        rule = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        fail(f"Megatron refuses these flags: {rule}; change what it names")


def _checked(args: argparse.Namespace) -> ResihpConfig:
    config = ResihpConfig.from_namespace(args)
    try:
        config.check()
        _check_injections(config, args.world_size)
        for scheduled in config.plans():
            plan_of(read_plan(scheduled.path))
        if config.resihp_emulate is not None:
            _check_emulation(config.resihp_emulate)
        if config.resihp_cost_model is not None:
            _check_cost_model(Path(config.resihp_cost_model))
    except (PlanError, ChangeRefused) as error:
        fail(f"--resihp-plan: {error}")
    except ProfileError as error:
        fail(f"--resihp-emulate: {error}; docs/usage.md says what is in a profile")
    except ConfigError as error:
        fail(str(error))
    parser = _known_parser()
    defaults = vars(parser.parse_args([]))
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    lines = refusals(vars(args), defaults, flags)
    if lines:
        fail("; ".join(lines))
    _check_sizes(args)
    _check_logs(args)
    return config


def _known_parser() -> argparse.ArgumentParser:
    assert _parser is not None, "Megatron has parsed its arguments"
    return _parser


def _check_injections(config: ResihpConfig, world_size: int) -> None:
    slowdowns = config.slowdowns()
    named = [injection.worker for injection in config.injections()] + [
        w for slowdown in slowdowns for w in slowdown.workers
    ]
    # Those that join or are started anew have ids of their own.
    most = int(os.environ.get(SLOTS, world_size)) * (1 + int(os.environ.get(MAX_RESTARTS, "0")))
    for worker in named:
        if worker >= most:
            raise ConfigError(f"--resihp-inject names worker {worker}, but there are {most}: 0..{most - 1}")
    if config.resihp_emulate is None and any(len(slowdown.workers) == 2 for slowdown in slowdowns):
        raise ConfigError("--resihp-inject can only slow links on the emulated clock; give --resihp-emulate too")


def _check_emulation(profile: str) -> None:
    if not cpu.installed():
        raise ConfigError("--resihp-emulate is for CPU workers; start the job with `resihp launch --stand-in`")
    load_profile(profile)


def _check_cost_model(path: Path) -> None:
    # Here, because importing them takes as long as a short job's iterations.
    from megatron_resihp.cost.fitted.store import CostModelError
    from megatron_resihp.detector.judging.learned import load

    try:
        load(path)
    except CostModelError as error:
        raise ConfigError(f"--resihp-cost-model {error}") from None


def _check_sizes(args: argparse.Namespace) -> None:
    """Sizes that no plan fits, said before Megatron's own assertion says it on every worker."""
    size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % size:
        fail(
            f"{args.world_size} workers are not a multiple of TP x PP = {size}, so no plan exists; "
            f"start {max(args.world_size // size, 1) * size} or change the parallel sizes"
        )
    per_step = args.micro_batch_size * (args.world_size // size) if args.micro_batch_size else None
    uneven = per_step and args.global_batch_size and args.global_batch_size % per_step
    if uneven and args.global_batch_size > per_step:
        fail(
            f"--global-batch-size {args.global_batch_size} is not a multiple of micro-batch size x replicas = "
            f"{per_step}, so no plan exists at the start; change one of them"
        )


def _check_data(args: argparse.Namespace) -> None:
    """Data sets that are not there; a data path may hold weights between the prefixes."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in getattr(args, name) or ():
            if not _is_number(prefix) and "://" not in prefix and not Path(f"{prefix}.idx").is_file():
                flag = "--" + name.replace("_", "-")
                fail(f"{flag} {prefix}: {prefix}.idx does not exist; make the data set with scripts/make_dataset.py")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_evaluation(args: argparse.Namespace) -> None:
    """Megatron counts evaluations before it looks whether there are any."""
    if args.eval_interval is None and not args.skip_train and not args.full_validation:
        fail("--eval-interval is missing; give it, with --eval-iters 0 for no evaluation")


def _check_batches(args: argparse.Namespace) -> None:
    replicas = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    if args.virtual_pipeline_model_parallel_size is not None:
        mend = "leave --num-layers-per-virtual-pipeline-stage out"
        fail(f"interleaved pipelines are not known to work with --resihp; {mend}")
    for name in ("global_batch_size", "eval_global_batch_size"):
        size = getattr(args, name)
        if size // args.micro_batch_size < replicas:
            flag = f"--{name.replace('_', '-')} {size}"
            fail(f"{flag} gives {replicas} replicas less than one micro-batch each; raise it")


def _check_logs(args: argparse.Namespace) -> None:
    """What stock Megatron finds on its last rank only."""
    if args.wandb_project and not (args.wandb_save_dir or args.save):
        fail("--wandb-project needs --wandb-save-dir or --save, to say where W&B keeps its files")
    if args.wandb_project and args.wandb_exp_name == "":
        fail("--wandb-exp-name is empty; name the run, or leave it out")
    if args.use_pytorch_profiler and args.profile and not args.tensorboard_dir:
        fail("--use-pytorch-profiler needs --tensorboard-dir: Megatron writes the profile beside that directory")


def fail(text: str) -> NoReturn:
    """End with one line on stderr and argparse's exit code."""
    print(f"resihp: {text}", file=sys.stderr, flush=True)
    raise SystemExit(exit_codes.REFUSED) from ConfigError(text)
