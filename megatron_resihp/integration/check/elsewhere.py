# SPDX-License-Identifier: Apache-2.0
"""What a job needs that this machine lacks, and that the job's nodes may have.

May import `control.worker.saved_state` and `patches.flags`.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.worker.saved_state import TRACKER
from megatron_resihp.integration.patches.arguments.flags import data_problems

FROM_FILES: Final = frozenset(
    {"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"}
)
"""Tokenizers whose model is always a file. That of others may be a name on a hub."""
NAME_ON_HUB: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
KERNEL: Final = "fused_weight_gradient_mlp_cuda"


def not_seen(given: argparse.Namespace, defaults: Mapping[str, Any]) -> Iterator[str]:
    """A line for each flag that names something which is not there.

    Args:
        given: Megatron's arguments as parsed.
        defaults: the script's own.
    """
    yield from data_problems(given)
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(given, name)
        is_name = name == "tokenizer_model" and _may_be_on_hub(path or "", given.tokenizer_type, defaults)
        if path and "://" not in path and not is_name and not Path(path).exists():
            yield f"--{name.replace('_', '-')} {path} does not exist; give a path that all nodes have"
    loads = given.load and not given.pretrained_checkpoint and "://" not in given.load
    if loads and given.exit_on_missing_checkpoint and not (Path(given.load) / TRACKER).is_file():
        yield (
            f"--load {given.load} has no checkpoint, so that --exit-on-missing-checkpoint ends the job as it begins; "
            "leave that out"
        )


def _may_be_on_hub(model: str, kind: str | None, defaults: Mapping[str, Any]) -> bool:
    return (kind or defaults.get("tokenizer_type")) not in FROM_FILES and NAME_ON_HUB.fullmatch(model) is not None


def without_apex(given: argparse.Namespace) -> Iterator[str]:
    """A line where this machine has the packages of a GPU job, but for the kernel that the head of each model needs."""
    if given.gradient_accumulation_fusion and _is_installed("transformer_engine") and not _is_installed(KERNEL):
        yield (
            f"Apex's {KERNEL} is not installed here, without which Megatron makes no head of a model; where nodes lack "
            "it, too, add --no-gradient-accumulation-fusion"
        )


def _is_installed(module: str) -> bool:
    """Whether Python finds it, whatever stands in for it in this process."""
    return PathFinder.find_spec(module) is not None
