# SPDX-License-Identifier: Apache-2.0
"""Joins survivors' files of parameters to a checkpoint in Megatron's distributed format, in one process without GPUs.

Megatron writes it. Files are mapped, and what has to be put together is in mapped files, too, so that the tensors of a
model need not fit into memory. May import torch and megatron.
"""

import json
import os
import queue
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_resihp.coding import encode
from megatron_resihp.control.worker.saved_state import SOURCE, TRACKER, iteration_name, source_of
from megatron_resihp.integration.emergency.alone import world_of_one
from megatron_resihp.integration.emergency.contents import MASTER, PARAM, Group, Parameter, Place, Range
from megatron_resihp.integration.state.fragments import cut, finest, fragments_of
from megatron_resihp.integration.state.reshardable import MASTER_KEY, TYPE

STATE_KEY = "optimizer.state."
WHOLE_MASTER_KEY = f"{STATE_KEY}fp32_param."
"""Where optimizers that are not distributed have masters; those of 32-bit parameters are the parameters."""

Flat = dict[str, torch.Tensor]
"""A flattened parameter and its optimizer's state, by kind."""


def join(group: Group, directory: Path) -> Path:
    """Write the checkpoint, and let later starts find it; returns where it is.

    Nothing is there under its name before all of it is. What is there of another run, or of another epoch, is replaced.

    Args:
        group: without gaps.
        directory: of checkpoints, such as `--load` takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / iteration_name(group.iteration)
    if source_of(directory, group.iteration) != group.source:
        aside = Path(tempfile.mkdtemp(prefix=".joining-", dir=directory))
        try:
            _write(group, aside / target.name, Scratch(aside / "scratch"))
            _put_in_place(aside / target.name, target, aside / "replaced")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    tracker = directory / f".{TRACKER}.{os.getpid()}"
    tracker.write_text(str(group.iteration))
    tracker.rename(directory / TRACKER)
    return target


def _put_in_place(new: Path, target: Path, old: Path) -> None:
    """Rename `new` to `target`; what is there becomes `old`, and no start finds any of it meanwhile."""
    if target.exists():
        (target.parent / TRACKER).unlink(missing_ok=True)
        target.rename(old)
    new.rename(target)


class Scratch:
    """Tensors in files without names, so that the system may write them out when it needs their memory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor."""
        path = self._directory / "tensor"
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        tensor = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
        path.unlink()
        return tensor.view(tuple(shape))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, in memory of its own: Megatron's writer copies parts of others into memory, all of them first."""
        if tensor.is_contiguous() and tensor.untyped_storage().size() == tensor.numel() * tensor.element_size():
            return tensor
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _write(group: Group, target: Path, scratch: Scratch) -> None:
    saved = {path: torch.load(path, mmap=True, weights_only=False) for path in group.files}
    # What all have alike may be old on a worker that kept nothing of a distributed optimizer.
    first = saved[max(group.files, key=lambda path: group.files[path].has_optimizer)]
    keys = _master_keys(first)
    tensors = (each for whole in _whole_parameters(group, saved, scratch) for each in _tensors(whole, keys))
    objects = {each.unique_key: replace(each, replica_id=0) for one in saved.values() for each in one["objects"]}
    parts = _of_one_shape(tensors, scratch)
    state = {**first["common"], "parts": [*parts, *objects.values()]}
    target.mkdir()
    with _writing_here(), world_of_one():
        dist_checkpointing.save(state, str(target), content_metadata=first["metadata"])
    (target / SOURCE).write_text(json.dumps(encode(group.source)) + "\n")


@contextmanager
def _writing_here() -> Iterator[None]:
    """Let Megatron write in this process alone, from the host: no device to wait for, no other process for a queue."""
    kept = FileSystemWriterAsync.preload_tensors, filesystem_async.get_write_results_queue
    FileSystemWriterAsync.preload_tensors = staticmethod(lambda buckets, _: buckets)
    filesystem_async.get_write_results_queue = queue.Queue
    try:
        yield
    finally:
        FileSystemWriterAsync.preload_tensors = staticmethod(kept[0])
        filesystem_async.get_write_results_queue = kept[1]


@dataclass
class _Whole:
    """A parameter, put together."""

    about: Parameter
    flat: Flat


def _whole_parameters(group: Group, saved: Mapping[Path, Mapping[str, Any]], scratch: Scratch) -> Iterator[_Whole]:
    """Each parameter of the workers' chunks once, whichever of them have it or ranges of it."""
    ranges: dict[tuple[Place, ...], dict[Range, Flat]] = {}
    about: dict[tuple[Place, ...], Parameter] = {}
    for path, contents in group.files.items():
        for name, parameter in contents.parameters.items():
            ranges.setdefault(parameter.places, {}).update(saved[path]["tensors"][name])
            about[parameter.places] = parameter
    for places, found in ranges.items():
        yield _Whole(about[places], _put_together(about[places], found, scratch))


def _put_together(about: Parameter, found: Mapping[Range, Flat], scratch: Scratch) -> Flat:
    whole = found.get((0, about.count))
    if whole is None:
        whole = {}
        for (start, end), part in found.items():
            for kind, tensor in part.items():
                whole.setdefault(kind, scratch.empty((about.count,), tensor.dtype))[start:end].copy_(tensor)
    if PARAM in whole:
        return whole
    return {PARAM: scratch.empty((about.count,), getattr(torch, about.dtype)).copy_(whole[MASTER]), **whole}


def _master_keys(saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a job's optimizers look for masters: its distributed one, others, or, where Muon is shared out by layers,
    both."""
    if TYPE not in saved["metadata"]:
        return (WHOLE_MASTER_KEY,)
    by_layers = getattr(saved["common"].get("args"), "use_layer_wise_distributed_optimizer", False)
    return (MASTER_KEY, WHOLE_MASTER_KEY) if by_layers else (MASTER_KEY,)


def _tensors(parameter: _Whole, master_keys: Sequence[str]) -> Iterator[ShardedTensor]:
    """What Megatron's checkpoints have of a parameter. `master_keys`: before the names of masters."""
    trained = len(parameter.flat) > 1
    for kind, flat in parameter.flat.items():
        if kind == PARAM:
            masters = MASTER_KEY in master_keys and trained and MASTER not in parameter.flat
            prefixes = ["", *([MASTER_KEY] if masters else [])]
        elif kind == MASTER:
            prefixes = list(master_keys)
        else:
            prefixes = [f"{STATE_KEY}{kind}."]
        for prefix in prefixes:
            for place in parameter.about.places:
                yield _at(place, prefix, flat)


def _at(place: Place, prefix: str, flat: torch.Tensor) -> ShardedTensor:
    data = flat.as_strided(place.view.size, place.view.stride, place.view.offset + flat.storage_offset())
    return ShardedTensor(
        prefix + place.key, data, data.dtype, tuple(data.shape), place.shape, place.offset, place.fragments,
        prepend_axis_num=place.prepended, allow_shape_mismatch=place.resizable,
    )  # fmt: skip


def _of_one_shape(tensors: Iterable[ShardedTensor], scratch: Scratch) -> list[ShardedTensor]:
    """Each part of each tensor once, of one shape for each tensor."""
    found = list(tensors)
    fragments = finest({each.key: fragments_of(each)} for each in found)
    parts = {(part.key, part.global_offset): part for each in found for part in cut(each, fragments[each.key])}
    return [replace(part, data=scratch.own(part.data)) for part in parts.values()]
