# SPDX-License-Identifier: Apache-2.0
"""A patch as one object: what it replaces, why, which signature it was written for, and how to undo it.

Imports the standard library only.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class PatchError(RuntimeError):
    """A target is not what the patch was written for; nothing was patched."""


@dataclass
class Patch:
    """Replaces one attribute of a module or class.

    Attributes:
        target: "package.module:attribute" or "package.module:Class.attribute".
        replacement: called with the original, returns what takes its place.
        parameters: names of the parameters that the target must have, in order; None where it is no function.
        why: one sentence.
    """

    target: str
    replacement: Callable[[Any], Any]
    parameters: tuple[str, ...] | None
    why: str
    _original: Any = field(default=None, repr=False)

    def _locate(self) -> tuple[Any, str]:
        module_name, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def present(self) -> Any:
        """What is there now."""
        owner, name = self._locate()
        return getattr(owner, name)

    def check(self) -> None:
        """Raise PatchError unless the target exists with the expected signature."""
        try:
            target = self.present()
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.target} does not exist ({error})") from error
        if self.parameters is None:
            return
        found = tuple(inspect.signature(target).parameters)
        if found[: len(self.parameters)] != self.parameters:
            raise PatchError(f"{self.target} takes ({', '.join(found)}), expected ({', '.join(self.parameters)}, ...)")

    def apply(self) -> None:
        owner, name = self._locate()
        self._original = getattr(owner, name)
        setattr(owner, name, self.replacement(self._original))

    def undo(self) -> None:
        owner, name = self._locate()
        setattr(owner, name, self._original)


def apply_all(patches: list[Patch]) -> None:
    """Check every patch first, then apply them in order: all or none."""
    for patch in patches:
        patch.check()
    applied: list[Patch] = []
    try:
        for patch in patches:
            patch.apply()
            applied.append(patch)
    except BaseException:
        undo_all(applied)
        raise


def undo_all(patches: list[Patch]) -> None:
    for patch in reversed(patches):
        patch.undo()
