# SPDX-License-Identifier: Apache-2.0
"""Patch: --use-checkpoint-args. What a worker was given counts, and not what it finds in a checkpoint besides.

A worker that joins later finds another checkpoint than the job's first workers, or one where they had none: the job has
saved meanwhile. That has the arguments of this same job, with what Megatron derives from them.

Replaces load_args_from_checkpoint in megatron.training.checkpointing. May import megatron and `integration`.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, Final

from megatron_resihp.integration.loop.joining import is_joining

_GIVEN: Final = "_given_before_the_checkpoint"


def wrap_load_args_from_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the arguments as they are before; a joining worker begins without an iteration of its own."""

    @functools.wraps(original)
    def load_args_from_checkpoint(args: argparse.Namespace, *others: Any, **options: Any) -> Any:
        if not args.resihp:
            return original(args, *others, **options)
        vars(args).setdefault(_GIVEN, dict(vars(args)))
        found = original(args, *others, **options)
        if is_joining():
            vars(args).pop("iteration", None)
        return found

    return load_args_from_checkpoint


def pop_given(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments without those of a checkpoint. They are kept no longer: a checkpoint has all that args has."""
    given = vars(args).pop(_GIVEN, None)
    return args if given is None else argparse.Namespace(**given)
