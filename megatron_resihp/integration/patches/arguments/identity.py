# SPDX-License-Identifier: Apache-2.0
"""What a worker is started with, as far as it decides what the worker computes: versions, flags, data.

Paths may differ between nodes, so what is there is compared in their place: sizes, and a digest of some blocks.
May import megatron and `integration`.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from megatron.core.package_info import __version__ as megatron_version

import megatron_resihp
from megatron_resihp import cpu
from megatron_resihp.control.worker.identity import Identity
from megatron_resihp.integration.support.workers import (
    AT_START,
    BY_CONTENT,
    DATA,
    IF_GIVEN,
    IN_STEP,
    MAY_DIFFER,
    OWN_ALWAYS,
)

BLOCKS, BLOCK_BYTES = 16, 64 * 1024
"""Blocks that are read of a file, spread evenly from the first to the last; a smaller file is read whole."""
COMPUTING = ("transformer-engine", "flash-attn", "apex")
"""Packages that compute, where they are installed."""
ENVIRONMENT = frozenset({"rank", "world_size", "local_rank"})
"""Arguments that are the launcher's."""


def identity_of(values: Mapping[str, Any], actions: Iterable[argparse.Action]) -> Identity:
    """The identity of this process.

    Args:
        values: arguments as parsed, before Megatron derives others from them.
        actions: of Megatron's parser, which say how arguments are spelled.
    """
    known = {action.dest: action for action in actions}
    always, at_start, in_step = versions(), dict[str, Any](), dict[str, Any]()
    for name, value in values.items():
        if name.startswith("_") or name in ENVIRONMENT or name in MAY_DIFFER:
            continue
        action = known.get(name)
        flag = action.option_strings[0] if action else f"--{name.replace('_', '-')}"
        if name in IN_STEP:
            in_step[name] = plain(value)
        elif name in AT_START or (name.startswith("resihp_") and name not in OWN_ALWAYS):
            at_start[flag] = _compared(name, value, action)
        else:
            always[flag] = _compared(name, value, action)
    return Identity(always, at_start, in_step)


def versions() -> dict[str, Any]:
    """Versions of what computes and of what the workers communicate with."""
    found: dict[str, Any] = {
        "megatron-core": megatron_version,
        "torch": torch.__version__,
        "megatron-resihp": megatron_resihp.__version__,
        "device": "stand-in" if cpu.installed() else "CUDA",
    }
    if not cpu.installed() and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in COMPUTING:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return found


def _compared(name: str, value: Any, action: argparse.Action | None) -> Any:
    if name in IF_GIVEN:
        return _given(value is not None)
    if name in DATA and value is not None:
        return _data(name, value)
    if name in BY_CONTENT and value is not None:
        return content(Path(value)) if Path(value).exists() else value
    if isinstance(value, bool) and action is not None and action.nargs == 0 and action.const is not None:
        # The value of --disable-bias-linear is that of what it disables.
        return _given(value == action.const)
    return plain(value)


def _given(given: bool) -> str:
    return "given" if given else "not given"


def plain(value: Any) -> Any:
    """A value as JSON has it, the same in every process."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    # The text of an object that has none of its own is its address.
    inherited: object = object.__repr__
    return type(value).__qualname__ if type(value).__repr__ is inherited else str(value)


# ---- what is at a path


def _data(name: str, value: Any) -> list[Any] | str:
    """What a data argument stands for: a list of weights and prefixes, or a file with such."""
    try:
        if name == "data_args_path":
            return _blend(Path(value).read_text().split())
        if name == "per_split_data_args_path":
            splits = json.loads(Path(value).read_text())
            lists = {split: paths.split() if isinstance(paths, str) else paths for split, paths in splits.items()}
            return [word for split in sorted(lists) for word in (split, *_blend(lists[split]))]
    except (OSError, ValueError):
        return "unreadable"  # Megatron will say so
    return _blend(value)


def _blend(words: Iterable[str]) -> list[Any]:
    return [_weight_or_data(str(word)) for word in words]


def _weight_or_data(word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        return word if "://" in word else f"index {content(Path(f'{word}.idx'))}, data {content(Path(f'{word}.bin'))}"


def content(path: Path) -> str:
    """What is there, in a few words that are equal where it is: of a directory, its files' names and sizes."""
    try:
        if path.is_dir():
            sizes = sorted((each.name, each.stat().st_size) for each in path.iterdir() if each.is_file())
            return f"{len(sizes)} files {hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]}"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for number in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"{size} bytes {digest.hexdigest()[:12]}"
