# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered in the next forward pass: what is waited for, and hooks that may be turned on twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.distributed import DistributedDataParallel

from megatron_resihp.integration.patches.parameter_gather import (
    wrap_disable_forward_pre_hook,
    wrap_enable_forward_pre_hook,
    wrap_finish_param_sync,
)


class Bucket:
    """One whose parameters another replica has; they come when they are waited for."""

    def __init__(self) -> None:
        self.param_gather_dispatched, self.param_gather_handle = False, None
        self.finished = 0

    def finish(self, skip_next_bucket_dispatch: bool = False) -> None:
        self.finished += 1
        self.param_gather_dispatched = True


def test_each_bucket_is_waited_for_once() -> None:
    noted: list[Any] = []
    ops = SimpleNamespace(in_op=True, note_parameters=lambda since: noted.append(("waited since", since)))
    runtime: Any = SimpleNamespace(probes=SimpleNamespace(ops=ops, mark=lambda: 7.0), reach=noted.append)
    finish, bucket = wrap_finish_param_sync(runtime, Bucket.finish), Bucket()
    for _ in range(3):  # as many of its modules run forwards
        finish(bucket, skip_next_bucket_dispatch=False)
    assert bucket.finished == 1 and noted == [("waited since", 7.0), "gather"]


def test_hooks_may_be_turned_on_and_off_in_any_order() -> None:
    """Megatron's own fail an assertion if they are on already, or off."""
    synced: list[bool] = []
    module = torch.nn.Linear(1, 1)
    wrapped: Any = SimpleNamespace(
        use_forward_hook=True, remove_forward_pre_hook_handles={}, module=module,
        _make_forward_pre_hook=lambda: lambda *_: None, start_param_sync=lambda force_sync: synced.append(force_sync),
    )  # fmt: skip
    enable = wrap_enable_forward_pre_hook(DistributedDataParallel.enable_forward_pre_hook)
    disable = wrap_disable_forward_pre_hook(DistributedDataParallel.disable_forward_pre_hook)
    disable(wrapped)
    for _ in range(2):
        enable(wrapped)
        assert len(module._forward_pre_hooks) == 1
    for _ in range(2):
        disable(wrapped)
        assert not module._forward_pre_hooks
    assert synced == [True], "whose hooks are off has no stale parameters"
