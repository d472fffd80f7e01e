# SPDX-License-Identifier: Apache-2.0
"""A save that must wait for the one before it hears of a death meanwhile."""

from unittest.mock import MagicMock

import pytest

from megatron_resihp.control.worker.errors import EpochBroken
from megatron_resihp.integration.loop import loop


def save(monkeypatch: pytest.MonkeyPatch, under_way: int) -> MagicMock:
    """Save in an epoch that breaks as soon as saves are waited for; returns Megatron's function."""
    runtime, megatron = MagicMock(), MagicMock()
    runtime.saves.is_there.return_value = False
    runtime.saves.writer.calls = under_way
    runtime.calls.position = 0
    runtime.job.args.distributed_timeout_minutes = 10
    monkeypatch.setattr(loop, "finish_saves", MagicMock(side_effect=EpochBroken))
    monkeypatch.setattr(loop, "data_parallel_of", lambda plan: 2)
    loop.wrap_save_checkpoint_and_time(runtime, megatron)(4)
    return megatron


def test_the_wait_for_a_busy_writer_ends_with_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EpochBroken):
        save(monkeypatch, under_way=1)


def test_a_save_is_not_waited_for_where_none_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    save(monkeypatch, under_way=0).assert_called_once()


@pytest.mark.parametrize(("is_known", "told"), [(False, 1), (True, 0)])
def test_the_log_names_a_checkpoint_that_is_not_made_again_once(is_known: bool, told: int) -> None:
    """Whoever reports has said so as it saw the save end, unless the epoch broke before."""
    runtime, megatron = MagicMock(), MagicMock()
    runtime.job.args.save = "saved"
    runtime.saves.repeated, runtime.saves.is_known.return_value = 4, is_known
    loop.wrap_save_checkpoint_and_time(runtime, megatron)(4)
    megatron.assert_not_called()
    assert [call.args[0].iteration for call in runtime.control.event.call_args_list] == [4] * told


def test_a_save_that_nobody_could_load_is_put_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Each iteration asks for it again, until a step was taken; the log says so once."""
    runtime, megatron = MagicMock(), MagicMock()
    runtime.job.args.save = "saved"
    runtime.saves.is_there.return_value, runtime.saves.lost = False, False
    runtime.mode.state.is_loadable.return_value = False
    for iteration in (4, 5):
        loop.wrap_save_checkpoint_and_time(runtime, megatron)(iteration)
    megatron.assert_not_called()
    assert runtime.saves.lost
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "does not save iteration 4" in said
