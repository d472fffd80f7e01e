# SPDX-License-Identifier: Apache-2.0
"""A recipe made small: all rules in their order. Imports this package."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recipe_runs.shrinking.devices import replace_devices
from recipe_runs.shrinking.draft import Draft, read_options
from recipe_runs.shrinking.grid import shrink_grid
from recipe_runs.shrinking.schedule import shrink_schedule, steps_reached
from recipe_runs.shrinking.sizes import shrink_sizes


@dataclass(frozen=True)
class Shrunk:
    """A recipe as it is run here.

    Attributes:
        words: the command line; `{run}` stands for the run's directory.
        workers: how many it has.
        kernels: what only GPUs compute in the recipe's way, and what does it here.
        replaced: what else is not as in the recipe, besides sizes.
        lost: why it is not run here; empty: it is.
    """

    words: tuple[str, ...]
    workers: int
    kernels: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def in_directory(self, directory: object) -> list[str]:
        return [word.replace("{run}", str(directory)) for word in self.words]


def shrink(words: Iterable[str], names: Mapping[str, str]) -> Shrunk:
    """The recipe's flags with smaller values, and without what only GPUs or its own machine have.

    Args:
        names: a flag's name by each of its spellings.
    """
    draft = Draft(read_options(words, names))
    unknown = draft.drop(*(flag for flag in draft.options if flag not in names.values()))
    if unknown:
        draft.lost.append(f"flags of a script of its own: {' '.join(unknown)}")
    reached = steps_reached(draft)
    replace_devices(draft)
    shrink_grid(draft)
    shrink_sizes(draft)
    shrink_schedule(draft, reached)
    return Shrunk(draft.words(), draft.workers, tuple(draft.kernels), tuple(draft.replaced), tuple(draft.lost))
