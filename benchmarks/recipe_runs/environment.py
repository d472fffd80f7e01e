# SPDX-License-Identifier: Apache-2.0
"""What recipes need around their command lines. Imports megatron inside functions only."""

import argparse
from collections.abc import Mapping
from typing import Final

ENVIRONMENT: Final = {
    # What --deterministic-mode asks for, and launch scripts set.
    "NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "WANDB_MODE": "offline", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own; to make it takes half a second."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def spellings(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """A flag's first spelling by each of its spellings."""
    return {spelled: action.option_strings[0] for action in parser._actions for spelled in action.option_strings}
