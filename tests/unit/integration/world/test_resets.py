# SPDX-License-Identifier: Apache-2.0
"""What of Megatron's singletons a recovery puts back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState, RerunStateMachine

from megatron_resihp.integration.world import world


def test_a_broken_attempt_leaves_no_explanation_of_a_result_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An injected error that stayed would be taken for the cause of the next real one."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state, machine.rerun_requested = RerunState.RERUNNING_IN_PLACE, True
    machine.error_injector.injected_error_type = RerunDiagnostic.PERSISTENT_ERROR
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    monkeypatch.setattr(world, "get_timers", lambda: SimpleNamespace(_timers={}))
    runtime: Any = SimpleNamespace(progress=SimpleNamespace(documents=None))
    world.reset_singletons(runtime, RerunMode.VALIDATE_RESULTS)
    assert machine.state is RerunState.NOT_RUNNING_YET and not machine.rerun_requested
    assert machine.error_injector.injected_error_type is None
