# SPDX-License-Identifier: Apache-2.0
"""What Megatron logs on the last rank becomes pages, and nothing on any other."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import timers
from megatron.training import global_vars

from megatron_resihp.integration.logs.log import MegatronLog, logs_wanted
from megatron_resihp.integration.logs.stand_ins import plain
from megatron_resihp.protocol.logs import LogPage, Place, Scalar, Text, WandbRow

ARGUMENTS: dict[str, Any] = {
    "tensorboard_dir": "logs", "tensorboard_queue_size": 5, "wandb_project": "project", "wandb_exp_name": "name",
    "wandb_entity": "", "wandb_save_dir": None, "save": "/saved", "lr": 1e-3, "params_dtype": torch.bfloat16,
}  # fmt: skip
LAST = SimpleNamespace(works=True, rank_order=(0, 2, 3), worker=3)
OTHER = SimpleNamespace(works=True, rank_order=(0, 2, 3), worker=2)
STANDBY = SimpleNamespace(works=False, rank_order=(0, 2, 3), worker=1)


class Control:
    """Keeps what is told to the coordinator."""

    worker = 3

    def __init__(self) -> None:
        self.told: list[LogPage] = []
        self.is_broken = False
        self.heard = SimpleNamespace(broken=lambda: self.is_broken)

    def tell(self, page: LogPage) -> None:
        self.told.append(page)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    names = ((global_vars, "_GLOBAL_TENSORBOARD_WRITER"), (global_vars, "_GLOBAL_WANDB_WRITER"),
             (timers, "SummaryWriter"), (timers, "wandb"))  # fmt: skip
    kept = [getattr(module, name) for module, name in names]
    yield
    for (module, name), value in zip(names, kept, strict=True):
        setattr(module, name, value)


def log_of(control: Control, **changes: Any) -> MegatronLog:
    return MegatronLog(control, logs_wanted(3, SimpleNamespace(**ARGUMENTS | changes)))  # type: ignore[arg-type]


def test_the_last_rank_s_page_has_all_that_was_logged() -> None:
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    writer.add_scalar("lm loss", torch.tensor([2.5]), 4)
    writer.add_scalar("grad-norm", math.inf, global_step=4)
    writer.add_text("seq_length", "32", global_step=0)
    wandb.log({"lm loss": torch.tensor(2.5)}, 4)
    wandb.config.update({"slurm_job_name": "N/A"})
    writer.flush()
    wandb.finish()
    log.send_page(Place(0, 4))
    [page] = control.told
    assert (page.worker, page.place) == (3, Place(0, 4))
    assert page.scalars == (Scalar("lm loss", 2.5, 4), Scalar("grad-norm", math.inf, 4))
    assert page.texts == (Text("seq_length", "32", 0),)
    assert page.rows == (WandbRow({"lm loss": 2.5}, 4),)
    assert page.config == {"slurm_job_name": "N/A"}
    writer.add_scalar("lm loss", 2.0, 5)
    log.send_page(Place(0, 5))
    assert control.told[1].scalars == (Scalar("lm loss", 2.0, 5),) and not control.told[1].texts


def test_a_page_of_a_broken_epoch_is_not_sent() -> None:
    """An aborted collective leaves garbage, which Megatron may have logged."""
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    global_vars.get_tensorboard_writer().add_scalar("lm loss", 1e30, 4)
    control.is_broken = True
    log.send_page(Place(0, 4))
    assert not control.told
    control.is_broken = False
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    global_vars.get_tensorboard_writer().add_scalar("lm loss", 2.5, 4)
    log.send_page(Place(0, 4))
    assert [page.scalars for page in control.told] == [(Scalar("lm loss", 2.5, 4),)]


@pytest.mark.parametrize("view", [OTHER, STANDBY], ids=["another rank", "a standby"])
def test_no_other_worker_logs(view: Any) -> None:
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    log.begin_epoch(view)
    assert global_vars.get_tensorboard_writer() is None and global_vars.get_wandb_writer() is None
    log.send_page(Place(0, 4))
    assert not control.told


def test_notes_of_a_broken_iteration_are_dropped() -> None:
    control = Control()
    log = log_of(control)
    for _ in range(2):
        log.begin_epoch(LAST)  # type: ignore[arg-type]
        global_vars.get_tensorboard_writer().add_scalar("lm loss", 2.5, 4)
    log.send_page(Place(0, 4))
    assert len(control.told[0].scalars) == 1


def test_an_iteration_of_which_nothing_is_logged_has_a_page_too() -> None:
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    log.send_page(Place(0, 4))
    assert control.told[0].place == Place(0, 4)


def test_a_job_without_logs_sends_no_pages() -> None:
    control = Control()
    log = log_of(control, tensorboard_dir=None, wandb_project=None)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    log.send_page(Place(0, 4))
    assert not log.is_wanted and not control.told and global_vars.get_tensorboard_writer() is None


def test_megatron_s_timers_take_the_stand_ins_for_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    measured = timers.Timers(0, "max")
    monkeypatch.setattr(measured, "_get_global_min_max_time", lambda *_: {"optimizer": (1.0, 2.0)})
    for writer in (global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()):
        measured.write(["optimizer"], writer, 4)
    log.send_page(Place(0, 4))
    assert control.told[0].scalars == (Scalar("optimizer-time", 2.0, 4),)
    assert control.told[0].rows == (WandbRow({"optimizer-time": 2.0}, 4),)


def test_what_can_t_be_sent_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log_of(Control()).begin_epoch(LAST)  # type: ignore[arg-type]
    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    for _ in range(2):
        writer.add_histogram("weights", [1.0], 4)
        wandb.log({"picture": object()}, 4)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "resihp: TensorBoard's add_histogram is not written with --resihp",
        "resihp: W&B's log of object is not written with --resihp",
    ]


def test_checkpoints_are_told_for_w_and_b() -> None:
    control = Control()
    log = log_of(control)
    log.begin_epoch(LAST)  # type: ignore[arg-type]
    log.note_saved("/saved/iter_0000004", "/saved/latest_checkpointed_iteration.txt", "/saved", 4)
    log.note_loaded("/saved/iter_0000002", "/saved")
    log.send_page(Place(0, 4))
    assert [(note.saved, note.path, note.iteration) for note in control.told[0].checkpoints] == [
        (True, "/saved/iter_0000004", 4), (False, "/saved/iter_0000002", 0)
    ]  # fmt: skip


def test_where_logs_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    wanted = logs_wanted(0, SimpleNamespace(**ARGUMENTS))
    assert wanted.tensorboard is not None and wanted.tensorboard.directory == str(tmp_path / "logs")
    assert wanted.wandb is not None and wanted.wandb.directory == "/saved/wandb" and wanted.wandb.entity is None
    assert wanted.wandb.config["params_dtype"] == "torch.bfloat16"


def test_any_argument_can_be_sent() -> None:
    values = {"a": math.nan, "b": 2**70, "c": [torch.float32, (1, None)], "d": {1: True}, "e": sys}
    found = plain(values)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["c"] == ["torch.float32", [1, None]] and found["d"] == {"1": True}
