# SPDX-License-Identifier: Apache-2.0
"""What a survivor's file of parameters holds, as the JSON beside it says; and what several of them lack. Pure.

May import `coding`, `plan` and `control.replanning.recovery.inventory`.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from megatron_resihp.coding import FILE, WrongValueError, decode
from megatron_resihp.control.replanning.recovery.inventory import lacking
from megatron_resihp.control.worker.saved_state import Source, files_of_parameters, modified_at
from megatron_resihp.plan import Shard
from megatron_resihp.plan.replica import experts_of

Sizes = tuple[int, ...]
Range = tuple[int, int]

PARAM: Final = "param"
"""What of a parameter a file may have besides its optimizer's state: the parameter,"""
MASTER: Final = "master"
"""and its 32-bit copy."""


EXPERT_IN_KEY: Final = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""Where Megatron saves each expert by itself, with its number in the key."""


class View(NamedTuple):
    """Which elements of a contiguous parameter are meant, as torch's `as_strided` has it."""

    size: Sizes
    stride: Sizes
    offset: int


class Place(NamedTuple):
    """Where Megatron's distributed checkpoints have a parameter, or a part of one.

    Attributes:
        key: of the whole tensor.
        view: the part of the parameter.
        shape: of the whole tensor.
        offset: of the part in it.
        fragments: in how many parts of this size each axis of the whole tensor is cut.
        prepended: how many axes the whole tensor has before those of the parameter.
        resizable: whether a job that loads it may have another size, as of the padded vocabulary.
    """

    key: str
    view: View
    shape: Sizes
    offset: Sizes
    fragments: Sizes
    prepended: int
    resizable: bool

    def cells(self, finest: Sizes) -> Iterator[Sizes]:
        """Which parts it is of a whole tensor that is cut more finely."""
        sizes = [full // count for full, count in zip(self.shape, self.fragments, strict=True)]
        fine = [full // count for full, count in zip(self.shape, finest, strict=True)]
        return product(*(range(start // unit, (start + size) // unit)
                         for start, size, unit in zip(self.offset, sizes, fine, strict=True)))  # fmt: skip

    def of_expert(self, number: int) -> Place:
        """The same in another expert of the layer. Experts are the last axis before those of the parameter.

        Source: megatron-core 0.19.2, `SequentialMLP.sharded_state_dict` and `TEGroupedMLP.sharded_state_dict`.

        Args:
            number: of the expert among all of its layer.
        """
        if EXPERT_IN_KEY.search(self.key):
            return self._replace(key=EXPERT_IN_KEY.sub(str(number), self.key))
        axis = self.prepended - 1
        return self._replace(offset=(*self.offset[:axis], number, *self.offset[axis + 1 :]))


@dataclass(frozen=True)
class Parameter:
    """What a file holds of a parameter.

    Attributes:
        places: none where it could not be told.
        ranges: elements of the flattened parameter; none: the worker holds it, but no state that is current.
        kinds: what the file has of each of these ranges: PARAM, MASTER, and names of the optimizer's state.
    """

    dtype: str
    shape: Sizes
    places: tuple[Place, ...]
    ranges: tuple[Range, ...]
    kinds: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """What a survivor's file holds.

    Attributes:
        run: what tells the run from others in the same run directory.
        epoch: in which it was written. Those who were cut off in an earlier one, and the others since, may have
            computed the same iteration with sums in another order.
        iteration: after which this is the state.
        layers: of the whole model, embedding and head included.
        held: the shards that it is of.
        copied: what another worker holds, of whose experts it has a copy, too.
        parameters: by name, as `CHUNK/NAME`.
        why_not: why it can't be joined with others; empty: it can.
        saved_at: Unix time; 0: an older version has written it.
    """

    worker: int
    run: str
    epoch: int
    iteration: int
    consumed_train_samples: int
    layers: int
    held: tuple[Shard, ...]
    parameters: dict[str, Parameter]
    why_not: str = ""
    copied: tuple[Shard, ...] = ()
    saved_at: float = 0.0

    @property
    def has_optimizer(self) -> bool:
        """Whether any of its optimizer's state is here. If not, what the optimizer counts may be old."""
        return any(set(each.kinds) - {PARAM} for each in self.parameters.values())


@dataclass(frozen=True)
class Group:
    """The files of one run that are of one epoch and one iteration."""

    iteration: int
    files: dict[Path, Contents]

    @property
    def source(self) -> Source:
        """Whose state it is, complete when the last file was."""
        each = next(iter(self.files.values()))
        return Source(max(_saved_at(*file) for file in self.files.items()), each.run, each.epoch)

    def is_of(self, run: str, epoch: int, directory: Path) -> bool:
        """Whether they are this run's, of this epoch and in this directory."""
        return all((path.parent, each.run, each.epoch) == (directory, run, epoch) for path, each in self.files.items())

    @property
    def gaps(self) -> tuple[str, ...]:
        """What no file has, in words."""
        return gaps_in(list(self.files.values()))


def found_groups(run_dir: Path) -> list[Group]:
    """What survivors have written by parameter in a run directory, the last iteration first.

    Within one iteration, the run that has saved last comes first, and within a run, its last epoch: clocks differ.
    """
    files: dict[tuple[int, Path, str, int], dict[Path, Contents]] = defaultdict(dict)
    for path in files_of_parameters(run_dir):
        contents = _read(path.with_suffix(".json"))
        if contents is not None:
            files[contents.iteration, path.parent, contents.run, contents.epoch][path] = contents
    groups = [Group(key[0], each) for key, each in files.items()]
    ended: dict[tuple[int, str], float] = defaultdict(float)
    for group in groups:
        run = group.iteration, group.source.run
        ended[run] = max(ended[run], group.source.saved_at)

    def newness(group: Group) -> tuple[int, float, int, float]:
        source = group.source
        return group.iteration, ended[group.iteration, source.run], source.epoch, source.saved_at

    return sorted(groups, key=newness, reverse=True)


def _saved_at(path: Path, contents: Contents) -> float:
    return contents.saved_at or modified_at(path.with_suffix(".json"))


def _read(path: Path) -> Contents | None:
    try:
        return decode(Contents, json.loads(path.read_text()), FILE)
    except (OSError, ValueError, WrongValueError):
        return None  # of another version, or damaged


def gaps_in(files: Sequence[Contents]) -> tuple[str, ...]:
    """What of the whole state no file has, in words; nothing: all of it is there."""
    usable = [each for each in files if not each.why_not]
    found = [f"what worker {each.worker} holds ({each.why_not})" for each in files if each.why_not]
    held = {each.worker: each.held for each in usable}
    layers = max((each.layers for each in usable), default=0)
    copied = [shard for each in usable for shard in each.copied]
    found += [words_of(shard) for shard in lacking(held, layers, copied=copied)] if held else []
    return tuple(found) or tuple(_gaps_in_parameters(usable)) or tuple(_gaps_in_tensors(usable))


def words_of(shard: Shard) -> str:
    """A shard for people."""
    first, end, rank, degree, *_ = shard
    experts = experts_of(shard)
    layers = f"layer {first}" if end == first + 1 else f"layers {first}–{end - 1}"
    members = "" if degree == 1 else f" TP rank {rank} of {degree}"
    shared = f", share {experts.rank} of {experts.degree} of the experts"
    return layers + members + (shared if experts.degree > 1 else "")


def _gaps_in_parameters(files: Iterable[Contents]) -> Iterator[str]:
    """Elements of parameters that are shared out over files."""
    ranges: dict[tuple[Place, ...], list[Range]] = defaultdict(list)
    about: dict[tuple[Place, ...], tuple[Parameter, Contents]] = {}
    for contents in files:
        for parameter in contents.parameters.values():
            ranges[parameter.places] += parameter.ranges
            about[parameter.places] = parameter, contents
    lost: dict[str, int] = defaultdict(int)
    for places, found in ranges.items():
        parameter, contents = about[places]
        if missing := parameter.count - covered(found):
            lost[", ".join(map(words_of, contents.held))] += missing
    for shards, elements in lost.items():
        yield f"{elements:,} elements of the optimizer's state of {shards}"


def covered(ranges: Iterable[Range]) -> int:
    """How many elements are in at least one of these ranges."""
    count = reached = 0
    for start, end in sorted(ranges):
        count += max(0, end - max(start, reached))
        reached = max(reached, end)
    return count


def _gaps_in_tensors(files: Iterable[Contents]) -> Iterator[str]:
    """Whole tensors that files have parts of only."""
    places: dict[tuple[str, str], set[Place]] = defaultdict(set)
    for contents in files:
        for parameter in contents.parameters.values():
            for place, kind in product(parameter.places, parameter.kinds):
                places[kind, place.key].add(place)
    for (kind, key), found in sorted(places.items()):
        finest = tuple(map(math.lcm, *(place.fragments for place in found))) if len(found) > 1 else min(found).fragments
        lost = math.prod(finest) - len({cell for place in found for cell in place.cells(finest)})
        if lost:
            yield f"{lost} of {math.prod(finest)} parts of {key} ({kind})"
