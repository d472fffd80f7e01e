# SPDX-License-Identifier: Apache-2.0
"""Flags without which Megatron ends the job, though its parser and its validation let it pass. A script may give their
values in code, so these are notes. Imports the standard library only.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any


def missing(given: argparse.Namespace, defaults: Mapping[str, Any]) -> Iterator[str]:
    """A line for each such flag that is not there, "cause; mend".

    Args:
        given: Megatron's arguments as parsed.
        defaults: the script's own.
    """

    def lacks(name: str) -> bool:
        return getattr(given, name) is None and defaults.get(name) is None

    if lacks("lr"):
        yield "--lr is missing; give it, unless the script sets it"
    if lacks("train_iters") and lacks("train_samples"):
        yield "--train-iters is missing, and so is --train-samples; give one of them, unless the script sets one"
    if lacks("tokenizer_type") and not (given.use_checkpoint_args or defaults.get("use_checkpoint_args")):
        yield "--tokenizer-type is missing, so Megatron makes no tokenizer; give it, unless the script sets it"
