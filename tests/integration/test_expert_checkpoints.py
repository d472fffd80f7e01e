# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are saved while fewer workers share experts: stock Megatron goes on from them under any degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import FP32, PRETRAIN, Jobs, tiny
from megatron.core.dist_checkpointing import load_common_state_dict
from stock_runs import OURS, stock_losses
from test_checkpoints import FUSED
from test_expert_parallelism import SHARED, WORKERS, degrees

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("layout", "reason"),
    [({}, "Could not find parameter group"), ({"use_distributed_optimizer": True}, "KeyError: 'optimizer'")],
    ids=["plain", "optimizer"],
)
def test_stock_megatron_goes_on_under_other_degrees(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], reason: str
) -> None:
    """Where each worker has all experts, it does so once the optimizers are one, as docs/limits.md has it."""
    path = tmp_path / "saved"
    saving = {"save": path, "save_interval": 6, "exit_interval": 6}
    job = jobs.run(tiny(**SHARED | layout | saving, resihp_inject="kill:3@3"), workers=WORKERS)
    assert job.code == 0 and degrees(job) == [(2, 4), (1, 3)], job.tails()
    loading = SHARED | layout | {"load": path, "ckpt_format": "torch_dist"}
    script = FUSED if layout else PRETRAIN

    def losses(degree: int) -> dict[int, float]:
        return stock_losses(jobs, script, WORKERS, **loading | {"expert_model_parallel_size": degree})

    expected = losses(2)
    assert sorted(expected) == [7, 8, 9] and losses(4) == pytest.approx(expected, rel=FP32.loss)
    alone = tiny(**loading | OURS | {"expert_model_parallel_size": 1})
    refused = jobs.run(alone, workers=WORKERS, script=script, without_plugin=True)
    assert refused.code != 0 and reason in refused.tails()
    saved = path / "iter_0000006"
    state = load_common_state_dict(saved)
    state["optimizer"] = state["optimizer"][0]
    torch.save(state, saved / "common.pt")
    assert losses(1) == pytest.approx(expected, rel=FP32.loss)
