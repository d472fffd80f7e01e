# SPDX-License-Identifier: Apache-2.0
"""The environment that workers are started with."""

from __future__ import annotations

import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node import environment
from megatron_resihp.control.node.environment import JobEnvironment, give_back_nccl, overruled, warnings_of
from megatron_resihp.control.transport.access.secret import VARIABLE as SECRET
from megatron_resihp.control.transport.address import Address

STORE = Address("localhost", 1)
ABSENT = Path("/absent/nccl.conf")
DIES = "survivors may fault on the memory of a dead peer, and die with it"


def test_a_worker_that_was_not_there_at_the_start_has_a_rank_of_the_first_world() -> None:
    """With that Megatron starts; the worker's id tells it from who has the rank."""
    job = JobEnvironment(
        node=2,
        size=JobSize(2, 2, late_nodes=1),
        store=STORE,
        run_dir=Path("run"),
        heartbeat_s=1.0,
        stand_in=False,
    )
    for worker, rank, local_rank in ((4, "0", "0"), (5, "1", "1"), (11, "1", "1")):
        found = job.of(worker, {}, {})
        assert (found["RESIHP_WORKER"], found["RANK"], found["LOCAL_RANK"]) == (str(worker), rank, local_rank)
        assert (found["WORLD_SIZE"], found["RESIHP_SLOTS"]) == ("4", "6")


def test_what_recovery_needs_of_nccl_is_no_choice_of_the_user() -> None:
    """torch's own defaults end survivors; a user's other settings stay."""
    job = JobEnvironment(node=0, size=JobSize(1, 2), store=STORE, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False)
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    found = job.of(1, {}, inherited)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_DIST_USE_NCCL2"] == "0"
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "4")


def test_memory_that_workers_share_on_switches_is_off_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL uses it by default. A job without the plugin has NCCL's own default."""
    job = JobEnvironment(node=0, size=JobSize(1, 2), store=STORE, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False)
    users = tmp_path / "nccl.conf"
    users.write_text("NCCL_NVLS_ENABLE=1\n")
    monkeypatch.setattr(environment, "SYSTEMS_CONF", ABSENT)
    none = {"NCCL_CONF_FILE": str(ABSENT)}
    assert job.of(1, {}, none)["NCCL_NVLS_ENABLE"] == "0"
    assert job.of(1, {}, none | {"NCCL_NVLS_ENABLE": "2"})["NCCL_NVLS_ENABLE"] == "2"
    assert "NCCL_NVLS_ENABLE" not in job.of(1, {}, {"NCCL_CONF_FILE": str(users)})
    for users_own in ({}, {"NCCL_NVLS_ENABLE": "2"}):
        found = job.of(1, {}, none | users_own)
        give_back_nccl(found)
        assert {name: value for name, value in found.items() if "NVLS" in name} == users_own


def test_workers_do_not_get_what_etcd_lets_the_coordinator_in_with() -> None:
    job = JobEnvironment(node=0, size=JobSize(1, 2), store=STORE, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False)
    found = job.of(1, {}, {"ETCDCTL_USER": "job:password", "ETCDCTL_KEY": "own.key", "HOME": "/home/me"})
    assert found["HOME"] == "/home/me" and not [name for name in found if name.startswith("ETCDCTL_")]


def test_workers_do_not_get_the_jobs_secret() -> None:
    """Their agent talks to the coordinator for them."""
    job = JobEnvironment(node=0, size=JobSize(1, 2), store=STORE, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False)
    assert SECRET not in job.of(1, {"RESIHP_STORE_FD": 5}, {SECRET: "which the user has given"})


def warnings_without_files(inherited: dict[str, str]) -> list[str]:
    """This machine may have files of NCCL's."""
    return warnings_of({"NCCL_CONF_FILE": str(ABSENT), **inherited}, ABSENT)


def test_settings_that_recovery_suffers_from() -> None:
    """A user may have a reason for them, so they stay; but nobody should learn of it from a lost job."""
    assert warnings_without_files({"NCCL_CUMEM_ENABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"}) == []
    (warning,) = warnings_without_files({"NCCL_CUMEM_ENABLE": "0"})
    assert warning == f"NCCL_CUMEM_ENABLE=0: {DIES}; unset it"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    file = tmp_path / "nccl.conf"
    file.write_text("# site\n\nNCCL_CUMEM_ENABLE=0\nNCCL_CUMEM_ENABLE=1\nNCCL_NVLS_ENABLE=1\nCUDA_LAUNCH_BLOCKING=1\n")
    return file


def test_settings_in_nccls_own_files_count_as_in_the_environment(system: Path) -> None:
    """The first of several counts, and what torch or CUDA reads is read before these files are."""
    assert warnings_of({"NCCL_CONF_FILE": str(ABSENT)}, system) == [
        f"NCCL_CUMEM_ENABLE=0 in {system}: {DIES}; unset it",
        f"NCCL_NVLS_ENABLE=1 in {system}: {DIES}; unset it",
    ]


def test_the_environment_counts_before_the_users_file_and_that_before_the_machines(
    tmp_path: Path, system: Path
) -> None:
    users = tmp_path / "mine.conf"
    users.write_text("NCCL_CUMEM_ENABLE=1\nNCCL_COMM_BLOCKING=0\n#NCCL_NVLS_ENABLE=0\n")
    given = {"NCCL_CONF_FILE": str(users), "NCCL_NVLS_ENABLE": "0"}
    (warning,) = warnings_of(given, system)
    assert warning.startswith(f"NCCL_COMM_BLOCKING=0 in {users}: ")


def test_without_a_name_for_it_the_users_file_is_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_CUMEM_ENABLE=0")
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_dir=str(tmp_path)))
    assert warnings_of({}, ABSENT) == [f"NCCL_CUMEM_ENABLE=0 in {tmp_path / '.nccl.conf'}: {DIES}; unset it"]

    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert warnings_of({}, ABSENT) == []


def test_older_names_count_where_the_newer_is_not_set() -> None:
    """As torch reads them."""
    assert warnings_without_files({"NCCL_DESYNC_DEBUG": "1"}) == [
        "NCCL_DESYNC_DEBUG=1: torch may end survivors when a peer dies; unset it"
    ]
    assert warnings_without_files({"NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DESYNC_DEBUG": "0"}) == []


def test_what_is_overruled_is_said() -> None:
    assert overruled({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "INFO"}) == []
    assert overruled({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "3"}) == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 becomes 0: recovery needs it; unset it"
    ]
