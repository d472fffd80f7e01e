# SPDX-License-Identifier: Apache-2.0
"""What a job whose replicas share sequences or experts may be started with."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_resihp.config import ConfigError, ResihpConfig
from megatron_resihp.integration.patches.arguments.context import check_sharing


def check(context: int = 1, experts: int = 1, **ours: Any) -> None:
    args = Namespace(context_parallel_size=context, expert_model_parallel_size=experts, add_bias_linear=False)
    check_sharing(ResihpConfig(**ours), args)


@pytest.mark.parametrize("sizes", [{"context": 2}, {"experts": 2}])
def test_such_a_job_plans_by_speed_or_uniformly(sizes: dict[str, int]) -> None:
    for strategy in ("uniform", "joint"):
        check(**sizes, resihp_strategy=strategy, resihp_emulate="h800")
    with pytest.raises(ConfigError, match=r"--resihp-strategy recycle doesn't know of .* that replicas share"):
        check(**sizes, resihp_strategy="recycle")
    check(resihp_strategy="recycle")


@pytest.mark.parametrize("ours", [{"resihp_plan": ("auto",)}, {"resihp_spread_replicas": True}])
def test_its_first_layout_is_megatrons(ours: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="doesn't know of experts that replicas share"):
        check(experts=2, **ours)
