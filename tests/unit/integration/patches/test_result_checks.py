# SPDX-License-Identifier: Apache-2.0
"""Megatron's checks for NaN: results of a broken epoch are nobody's fault, all others are checked as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

from megatron_resihp.integration.patches.result_checks import wrap_validate_result


@pytest.mark.parametrize("broken", [True, False])
def test_a_nan_is_a_fault_only_while_the_epoch_holds(broken: bool) -> None:
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
    _runtime_checks(broken)(machine, torch.tensor(torch.nan), torch.isnan, "NaN in the loss", fatal=True)
    assert machine.rerun_requested is not broken


def test_without_reruns_a_nan_of_a_broken_epoch_does_not_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    loss = torch.tensor(torch.nan)
    _runtime_checks(True)(machine, loss, rejection_func=torch.isnan, message="NaN in the loss", fatal=True)
    with pytest.raises(RuntimeError, match="NaN in the loss"):
        _runtime_checks(False)(machine, loss, rejection_func=torch.isnan, message="NaN in the loss", fatal=True)


def test_the_epoch_may_break_while_a_result_is_awaited() -> None:
    heard = {"broken": False}

    def rejects(loss: torch.Tensor) -> bool:
        heard["broken"] = True
        return bool(torch.isnan(loss))

    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
    _runtime_checks(heard)(machine, torch.tensor(torch.nan), rejects, "NaN in the loss")
    assert not machine.rerun_requested


def _runtime_checks(broken: Any) -> Any:
    heard = SimpleNamespace(broken=lambda: broken["broken"] if isinstance(broken, dict) else broken)
    job = SimpleNamespace(args=SimpleNamespace(distributed_backend="gloo"))
    runtime: Any = SimpleNamespace(control=SimpleNamespace(heard=heard), job=job)
    return wrap_validate_result(runtime, RerunStateMachine.validate_result)
