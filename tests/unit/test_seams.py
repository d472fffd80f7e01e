"""Every patch fits the Megatron that is installed: a release that moves a target fails here, not in a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.config import DRILL_POINTS
from megatron_resihp.integration import enable
from megatron_resihp.integration.drill_points import TARGETS, drill_patches
from megatron_resihp.integration.probe_seams import probe_patches
from megatron_resihp.integration.seams import training_patches

RUNTIME: Any = SimpleNamespace(drills=SimpleNamespace(points=lambda: set(DRILL_POINTS)))


PATCHES = training_patches(RUNTIME) + probe_patches(RUNTIME) + drill_patches(RUNTIME)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_a_target_is_as_the_patch_expects(patch: Any) -> None:
    patch.check()
    assert patch.why


def test_every_target_is_named_once() -> None:
    targets = [patch.target for patch in training_patches(RUNTIME) + probe_patches(RUNTIME)]
    assert len(set(targets)) == len(targets)


def test_drills_hook_in_only_where_they_wait() -> None:
    runtime: Any = SimpleNamespace(drills=SimpleNamespace(points=lambda: {"p2p", "norm"}))
    assert [patch.target for patch in drill_patches(runtime)] == list(TARGETS["p2p"])
    assert set(TARGETS) <= set(DRILL_POINTS)


def test_the_installed_release_is_supported() -> None:
    assert enable._version_problem() is None


def test_another_release_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enable, "SUPPORTED", (0, 12))
    problem = enable._version_problem()
    assert problem is not None and "install megatron-core>=0.12,<0.13" in problem and "is not supported" in problem
