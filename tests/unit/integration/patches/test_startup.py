# SPDX-License-Identifier: Apache-2.0
"""What is kept of a job's start-up for later epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import mpu
from megatron.training import training

from megatron_resihp.integration.patches.counting import OneReplica
from megatron_resihp.integration.patches.startup import (
    _build_again,
    chosen_once,
    counting_samples,
    wrap_build_model,
    wrap_ddp,
)


def test_a_script_chooses_ranks_as_the_job_began() -> None:
    """Whatever arguments say later, and for every pipeline alike."""
    arguments = {"has_mtp": True}

    def embedding_ranks(ranks: list[int]) -> list[int]:
        return [ranks[0], ranks[-1]] if arguments["has_mtp"] else [ranks[0]]

    chosen = chosen_once(embedding_ranks)
    assert chosen([4, 6, 8]) == [4, 8]
    arguments["has_mtp"] = False
    assert chosen([1, 3, 5]) == [1, 5]
    assert chosen([7]) == [7]


def test_models_are_built_for_the_replicas_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop the counters see one, and Megatron 0.18 would cut buffers of gradients for one."""
    counted = OneReplica()
    monkeypatch.setattr(training, "mpu", counted)
    runtime: Any = SimpleNamespace(mode=SimpleNamespace(state=SimpleNamespace(build_model=lambda call: call())))
    seen: list[Any] = []
    wrap_build_model(runtime, lambda: seen.append(training.mpu) or [])()  # type: ignore[func-returns-value]
    assert seen == [mpu]
    assert training.mpu is counted


def test_a_scheduler_is_made_again_from_the_flags_that_it_was_made_from() -> None:
    """Megatron sets the iterations of a job of so many samples when it makes the first, and looks for them first."""
    by_samples = SimpleNamespace(train_samples=100, train_iters=25, step_batch_size_schedule="0:4")
    with counting_samples(by_samples):
        assert by_samples.train_iters is None
    assert (by_samples.train_iters, by_samples.step_batch_size_schedule) == (25, "0:4")
    by_iterations = SimpleNamespace(train_samples=None, train_iters=25, step_batch_size_schedule=None)
    with counting_samples(by_iterations):
        assert by_iterations.train_iters == 25


@pytest.mark.parametrize("built_again", [False, True])
def test_parameters_are_taken_over_before_there_are_gradients(built_again: bool) -> None:
    """Only where chunks are built again; before that there is nothing to take over."""
    steps: list[Any] = []
    succession = SimpleNamespace(
        parameters_of=lambda module, in_buffers: steps.append((module, in_buffers)),
        built=lambda chunk: steps.append("built"),
    )
    runtime: Any = SimpleNamespace(
        held=SimpleNamespace(succession=succession if built_again else None),
        job=SimpleNamespace(own=SimpleNamespace(expert_parallel=1)),
    )

    def megatrons(self: Any, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False) -> None:
        steps.append(f"gradients, {disable_bucketing}")

    init = wrap_ddp(runtime, megatrons)
    setting = SimpleNamespace(use_distributed_optimizer=True)
    init(object(), config=None, ddp_config=setting, module="module", disable_bucketing=True)
    made = "gradients, True"
    assert steps == ([("module", True), made, "built"] if built_again else [made])


def test_models_that_are_built_again_are_not_initialized() -> None:
    """Each parameter is overwritten. Megatron's builder looks into the configuration, a script's into the arguments."""
    config = SimpleNamespace(perform_initialization=True)
    args = SimpleNamespace(
        perform_initialization=True, load="there", pretrained_checkpoint=None, train_samples=None, train_iters=1,
        step_batch_size_schedule=None,
    )  # fmt: skip
    live = SimpleNamespace(model=[SimpleNamespace(config=config)])
    runtime: Any = SimpleNamespace(job=SimpleNamespace(args=args), held=SimpleNamespace(live=live))
    seen: list[bool] = []

    def set_up() -> tuple[list[Any], None, None]:
        seen.extend((config.perform_initialization, args.perform_initialization))
        return [], None, None

    release: Any = SimpleNamespace(set_up_takes_groups=False)
    _build_again(runtime, release, set_up, hooks={})
    assert seen == [False, False]
