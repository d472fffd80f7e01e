# SPDX-License-Identifier: Apache-2.0
"""Every patch fits the Megatron that is installed: a release that moves a target fails here, not in a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.config import INJECTION_POINTS
from megatron_resihp.integration import enable
from megatron_resihp.integration.patches.experts.additional_rounds import patches_of as round_patches
from megatron_resihp.integration.patches.experts.uneven import patches_of as uneven_patches
from megatron_resihp.integration.patches.training import training_patches
from megatron_resihp.integration.probes.injection_points import IN_BACKWARD, TARGETS, injection_patches
from megatron_resihp.integration.probes.patches import probe_patches
from megatron_resihp.integration.releases import current
from megatron_resihp.integration.streams.patches import patches_of as stream_patches


def worker(points: set[str]) -> Any:
    """One whose fault injections wait for these points."""
    injections = SimpleNamespace(points=lambda: points)
    return SimpleNamespace(
        scheduled=SimpleNamespace(injections=injections), job=SimpleNamespace(args=SimpleNamespace(seed=1))
    )


RUNTIME = worker(set(INJECTION_POINTS))


TRAINING = training_patches(RUNTIME, current())
PATCHES = [
    *enable.writer_patches(), *TRAINING, *probe_patches(RUNTIME), *injection_patches(RUNTIME),
    *stream_patches(RUNTIME), *round_patches(RUNTIME), *uneven_patches(),
]  # fmt: skip


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_a_target_is_as_the_patch_expects(patch: Any) -> None:
    patch.check()
    assert patch.why


def test_every_target_is_named_once() -> None:
    targets = [patch.target for patch in TRAINING + probe_patches(RUNTIME)]
    assert len(set(targets)) == len(targets)


def test_injections_hook_in_only_where_they_wait() -> None:
    assert [patch.target for patch in injection_patches(worker({"p2p", "norm"}))] == list(TARGETS["p2p"])
    assert set(TARGETS | IN_BACKWARD) <= set(INJECTION_POINTS)


@pytest.mark.parametrize("stand_in", [False, True])
def test_a_worker_without_a_gpu_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch, stand_in: bool) -> None:
    monkeypatch.setattr(enable.sys, "argv", ["pretrain_gpt.py", "--resihp"])
    monkeypatch.setattr(enable.cpu, "installed", lambda: stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    problem = enable._device_problem()
    assert problem is None if stand_in else "no CUDA device; check CUDA_VISIBLE_DEVICES" in str(problem)
