# SPDX-License-Identifier: Apache-2.0
"""What Megatron's own validation derives from a job's arguments for another degree of tensor parallelism.

Megatron derives sizes from the degree once, at the start, and looks them up for as long as the job lasts. Which ones it
derives differs between releases, so they are found by letting it validate copies. Imports the standard library only.
"""

import argparse
import contextlib
import copy
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

OF_THE_WORLD: Final = frozenset({"world_size"})
"""What a copy is given itself, so that it has one replica whatever the degree."""
CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


class DerivedArguments:
    """The derived arguments of one job.

    Args:
        validate: Megatron's validate_args, which completes what it is given.
        args: as parsed, before they are validated.
        defaults: of the script, as validate_args takes them.
    """

    def __init__(self, validate: Callable[..., Any], args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
        self._validate = validate
        self._args = copy.deepcopy(args)
        self._defaults = dict(defaults)
        self._known: dict[int, dict[str, Any]] = {}

    def of_degree(self, degree: int) -> dict[str, Any]:
        """The arguments that would be others in a job of this degree, as they would be there.

        Raises:
            RuntimeError: Megatron refuses this degree.
        """
        own, other = self._derive(self._args.tensor_model_parallel_size), self._derive(degree)
        names = other.keys() & own.keys() - OF_THE_WORLD
        return {name: other[name] for name in sorted(names) if not _alike(other[name], own[name])}

    def _derive(self, degree: int) -> dict[str, Any]:
        if degree not in self._known:
            args = copy.deepcopy(self._args)
            args.tensor_model_parallel_size = degree
            if degree == 1:
                # A single member has nobody to distribute them to, and Megatron insists on several.
                args.distribute_saved_activations = False
            args.world_size = degree * args.pipeline_model_parallel_size * args.context_parallel_size
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _one_connection():
                    warnings.simplefilter("ignore")
                    self._validate(args, dict(self._defaults))
            except (AssertionError, ValueError) as error:
                raise RuntimeError(f"Megatron refuses stages of {degree} TP members: {error}") from error
            self._known[degree] = vars(args)
        return self._known[degree]


@contextlib.contextmanager
def _one_connection() -> Iterator[None]:
    """Before Blackwell Megatron insists on this with tensor parallelism, for its speed. A job whose own degree is 1 may
    have begun without, and its plans have stages of several members all the same."""
    before = os.environ.get(CONNECTIONS)
    os.environ[CONNECTIONS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CONNECTIONS]
        else:
            os.environ[CONNECTIONS] = before


def _alike(one: Any, other: Any) -> bool:
    """Equal, or objects that say the same where their class doesn't compare them."""
    if type(one) is not type(other):
        return False
    return bool(one == other) or (hasattr(one, "__dict__") and vars(one) == vars(other))
