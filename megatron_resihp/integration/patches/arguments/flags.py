# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's argument parser. Adds the --resihp* flags and validates them together with Megatron's.

Replaces add_megatron_arguments and validate_args in megatron.training.arguments.
"""

import argparse
import contextlib
import functools
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron.core.dist_checkpointing.strategies.nvrx import NVRX_MIN_VERSION
from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

from megatron_resihp import cpu
from megatron_resihp.config import ConfigError, ResihpConfig, add_arguments
from megatron_resihp.control.node.environment import MAX_RESTARTS, SLOTS, give_back_nccl
from megatron_resihp.control.replanning.change import ChangeRefused, plan_of
from megatron_resihp.control.worker.identity import Identity
from megatron_resihp.cost.profile import ProfileError, load_profile
from megatron_resihp.integration.failing import fail
from megatron_resihp.integration.modes.overlaps import lost_always
from megatron_resihp.integration.patches.arguments.checkpoint_arguments import pop_given
from megatron_resihp.integration.patches.arguments.context import check_sharing
from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.patches.arguments.identity import identity_of
from megatron_resihp.integration.patches.arguments.model_configuration import check_model, refusal
from megatron_resihp.integration.patches.arguments.sizes import (
    check_batches,
    check_instances,
    check_pipeline,
    check_sequence,
    check_sizes,
    with_fitting_sizes,
)
from megatron_resihp.integration.streams.seeds import draws
from megatron_resihp.integration.support import GIVEN_UP, TABLE, refusals
from megatron_resihp.integration.support.batches import batch_steps
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
        if _parser is None:
            _parser = original(argparse.ArgumentParser(add_help=False))
        _mend_help(original(parser))
        return add_arguments(parser)

    return add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Some of Megatron 0.19's help texts hold a bare '%', on which argparse's --help ends with an error."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            if "%" in (action.help or ""):
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
            without = give_up_overlaps(args)
            given = vars(with_defaults(pop_given(args), defaults))
            derived = DerivedArguments(original, args, defaults)
            examined = examine(original, args, defaults)
            if lines := [*examined.refusals, *data_problems(args)]:
                fail(*lines)
            if os.environ.get("RANK", "0") == "0":
                for line in without:
                    print(f"resihp: without overlap: {line}", flush=True)
            # The launcher heeds signals, for all workers after one iteration.
            args.exit_signal_handler = False
            switch_on(examined.config, derived, functools.partial(identity_of, given, known_parser()._actions))
            return examined.validated

        return validate_args

    return wrap_validate_args


def give_up_overlaps(args: argparse.Namespace) -> list[str]:
    """Turn off the overlaps that no job with --resihp has; a line for each. Before validation, which refuses some of
    them where a stage has one member."""
    lines = [*lost_always(vars(args))]
    for name in GIVEN_UP.keys() & vars(args).keys():
        setattr(args, name, False)
    return lines


YAML: Final = (
    "--yaml-cfg is not supported with --resihp: Megatron reads the file past its parser and its checks; give flags"
)


def reads_yaml(words: Sequence[str]) -> bool:
    """Whether Megatron would read the arguments of a job with --resihp from a file."""
    return "--resihp" in words and any(word.partition("=")[0] == "--yaml-cfg" for word in words)


@dataclass(frozen=True)
class Examined:
    """A command line with --resihp.

    Attributes:
        config: our flags.
        refusals: a line for each thing that keeps the job out, "cause; mend".
        validated: Megatron's arguments as its own validation has completed them; None: it was not done.
    """

    config: ResihpConfig
    refusals: tuple[str, ...]
    validated: Any


def examine(validate: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any]) -> Examined:
    """Look for everything that keeps a job out, but for its data.

    Args:
        validate: Megatron's own validation, which completes `args`.
        args: as parsed; `world_size` is None where it is not known how many workers there will be.
        defaults: of the script, as validate_args takes them.
    """
    config = ResihpConfig.from_namespace(args)
    given = with_defaults(args, defaults)
    lines = [
        *_raised(lambda: _check_own_flags(config, args.world_size)),
        *unsupported(given),
        *_raised(lambda: _check_evaluation(given)),
        *_raised(lambda: _check_logs(given)),
        *_raised(lambda: _check_streams(config, given)),
        *_raised(lambda: check_sharing(config, given)),
    ]
    # What Megatron itself asserts first, in other words.
    is_known = args.world_size is not None
    misfits = _raised(lambda: check_sizes(args)) if is_known else []
    lines += misfits
    validated = None
    try:
        if misfits or not is_known:
            lines += _of_other_flags(validate, with_fitting_sizes(args), defaults)
        else:
            validated = _megatron_validates(validate, args, defaults)
            _take_batch_of_schedule(validated)
            lines += _of_validated(validated)
            lines += _raised(lambda: check_instances(validated))
            lines += _raised(lambda: check_batches(validated))
    except ConfigError as error:
        lines.append(str(error))
    except (Exception, SystemExit):
        # What we refuse may be why; at a flag that it has given up, Megatron exits.
        if not lines:
            raise
    return Examined(config, tuple(lines), validated)


def with_defaults(args: argparse.Namespace, defaults: dict[str, Any]) -> argparse.Namespace:
    """A copy with the script's own defaults where nothing else is given, as Megatron's validation puts them."""
    missing = {name: value for name, value in defaults.items() if vars(args).get(name) is None}
    return argparse.Namespace(**vars(args) | missing)


def _of_other_flags(validate: Callable[..., Any], fitting: argparse.Namespace, defaults: dict[str, Any]) -> list[str]:
    """What would keep the job out if its sizes fitted. What Megatron prints of those is none of the job's."""
    with contextlib.redirect_stdout(io.StringIO()):
        return _of_validated(_megatron_validates(validate, fitting, defaults))


def _of_validated(args: argparse.Namespace) -> list[str]:
    """What keeps a job out, however many workers it has."""
    # Megatron's configuration of the model asserts what the pipeline needs, too, in other words.
    pipeline = _raised(lambda: check_pipeline(args))
    others = [*_raised(lambda: _check_saves(args)), *_raised(lambda: check_sequence(args))]
    return [*others, *(pipeline or _raised(lambda: check_model(args)))]


def _raised(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []


def _megatron_validates(original: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any]) -> Any:
    """Megatron's own validation, what it asserts said in one line instead of a traceback."""
    try:
        return original(args, defaults)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise refusal(error) from error


def _take_batch_of_schedule(args: argparse.Namespace) -> None:
    """Beside a schedule of batches Megatron sets the global batch to a micro-batch of each replica, and takes no notice
    of it where a job has so many samples. The plugin reads samples and moves the scheduler by it. The first one is that
    of the first plan."""
    if steps := batch_steps(vars(args)):
        args.global_batch_size = steps[0][1]


def _check_own_flags(config: ResihpConfig, world_size: int | None) -> None:
    try:
        config.check()
        if world_size is not None:
            _check_injections(config, world_size)
        for scheduled in config.plans():
            plan_of(read_plan(scheduled.path))
        if config.resihp_emulate is not None:
            _check_emulation(config.resihp_emulate)
        if config.resihp_cost_model is not None:
            _check_cost_model(Path(config.resihp_cost_model))
    except (PlanError, ChangeRefused) as error:
        raise ConfigError(f"--resihp-plan: {error}") from error
    except ProfileError as error:
        raise ConfigError(f"--resihp-emulate: {error}; docs/try.md says what is in a profile") from error


def unsupported(args: argparse.Namespace) -> list[str]:
    """A line for each of Megatron's flags that is not known to work."""
    parser = known_parser()
    defaults = vars(parser.parse_args([]))
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    return refusals(vars(args), defaults, flags)


def known_parser() -> argparse.ArgumentParser:
    """Megatron's own flags, without ours and the script's."""
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


def _check_saves(args: argparse.Namespace) -> None:
    """What Megatron finds out at the first save."""
    if not args.async_save:
        return
    if args.ckpt_format == "torch":
        raise ConfigError("--async-save does not know --ckpt-format torch; use torch_dist")
    try:
        get_async_strategy(args.async_strategy)
    except ModuleNotFoundError:
        mend = "install it or use --async-strategy mcore"
        needed = f"nvidia-resiliency-ext>={NVRX_MIN_VERSION}"
        raise ConfigError(f"--async-save needs a package that is not installed, {needed}; {mend}") from None


def data_problems(args: argparse.Namespace) -> list[str]:
    """A line for each flag whose data sets are not there; it may hold weights between the prefixes."""
    lines = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        prefixes = [each for each in getattr(args, name) or () if not _is_number(each) and "://" not in each]
        lacking = [each for each in prefixes if not Path(f"{each}.idx").is_file()]
        if lacking:
            more = f", nor {len(lacking) - 1} more of {len(prefixes)}" if len(lacking) > 1 else ""
            mend = "give prefixes of .bin and .idx files, which Megatron's tools/preprocess_data.py makes"
            lines.append(f"--{name.replace('_', '-')} {lacking[0]}: {lacking[0]}.idx does not exist{more}; {mend}")
    return lines


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_evaluation(args: argparse.Namespace) -> None:
    if args.eval_interval is None and not args.skip_train and not args.full_validation:
        why = TABLE["eval_interval"].needed
        raise ConfigError(f"--eval-interval is missing: {why}; give it, with --eval-iters 0 for no evaluation")


def _check_logs(args: argparse.Namespace) -> None:
    """What stock Megatron finds on its last rank only."""
    if args.wandb_project and not (args.wandb_save_dir or args.save):
        raise ConfigError("--wandb-project doesn't say where W&B keeps its files; give --wandb-save-dir or --save")
    if args.wandb_project and args.wandb_exp_name == "":
        raise ConfigError("--wandb-exp-name is empty; name the run, or leave it out")
    if args.use_pytorch_profiler and args.profile and not args.tensorboard_dir:
        raise ConfigError(
            "--use-pytorch-profiler needs --tensorboard-dir: Megatron writes the profile beside that directory"
        )


def _check_streams(config: ResihpConfig, args: argparse.Namespace) -> None:
    """Transformer Engine's tracker keeps generators instead of states. Recomputation restores none that are in use, so
    what begins in the middle of a layer, where no stream of this package begins, draws other masks than before."""
    own = draws(args) and not config.resihp_megatron_random_streams
    if own and args.te_rng_tracker and (args.recompute_activations or args.recompute_granularity == "selective"):
        mend = "leave it out, recompute whole layers, or set dropout to 0"
        raise ConfigError(f"--te-rng-tracker has other masks in parts of a layer that are recomputed; {mend}")
