# SPDX-License-Identifier: Apache-2.0
"""`resihp launch` in torchrun's place: what it makes of torchrun's own flags, as real scripts give them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_resihp.control.commands.launch.launch_options import (
    LaunchError,
    LaunchOptions,
    add_arguments,
    check,
    options_of,
)
from megatron_resihp.control.commands.launch.torchrun_flags import HONOURED, MISSED, OURS, WITHOUT_EFFECT
from megatron_resihp.control.transport.address import Address

HEAD = "head"


def options(
    words: str, environment: Mapping[str, str] = {}, gpus: int = 8, here: str = "elsewhere"
) -> LaunchOptions:  # fmt: skip
    """What a command line asks for, on a machine of that name with so many GPUs."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    namespace = parser.parse_args([*words.split(), "train.py", "--lr", "1"])
    return options_of(namespace, environment, lambda word: {"gpu": gpus, "cpu": 4, "auto": gpus or 4}[word],
                      lambda host: host == here)  # fmt: skip


def refused(words: str, environment: Mapping[str, str] = {}, gpus: int = 8) -> str:
    """Why a command line can't be."""
    with pytest.raises(LaunchError) as caught:
        options(words, environment, gpus)
    assert "; " in str(caught.value), "says what to do"
    return str(caught.value)


def test_every_flag_of_torchrun_is_known() -> None:
    """In both of its spellings; a newer torch may have more."""
    run = pytest.importorskip("torch.distributed.run")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings}
    theirs = {flag for action in run.get_args_parser()._actions for flag in action.option_strings}
    assert theirs - ours == set()
    known = OURS.keys() | HONOURED.keys() | WITHOUT_EFFECT.keys() | MISSED.keys()
    unknown_to_torch = {f"--{name.replace('_', '-')}" for name in known} - theirs
    assert unknown_to_torch == {"--use-env"}, "which torch.distributed.launch has"


def test_one_node_of_a_script_with_a_master() -> None:
    """The examples of Megatron-LM."""
    found = options("--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 29500")
    assert (found.workers_per_node, found.nodes, found.node) == (8, 1, 0)
    assert found.coordinator == Address("localhost", 29500)
    assert found.run_dir is None, "a new one, as without torchrun's flags"
    assert found.command == ("train.py", "--lr", "1")


def test_several_nodes_with_a_master() -> None:
    found = options("--nproc_per_node=8 --nnodes=4 --node_rank=3 --master_addr=head --master_port=6000")
    assert (found.nodes, found.node, found.coordinator) == (4, 3, Address(HEAD, 6000))
    assert found.run_dir == Path("resihp-runs/head-6000"), "all nodes find it without being told"
    assert options("--nnodes 2 --master-addr head").coordinator == Address(HEAD, 29500)
    assert options("--nnodes 2 --master-addr head", {"SLURM_JOB_ID": "77"}).run_dir == Path("resihp-runs/77")


def test_a_master_without_brackets() -> None:
    """torchrun takes a host and a port apart."""
    for host in ("fd00::1", "[fd00::1]"):
        found = options(f"--nnodes 2 --master_addr {host} --master_port 6000")
        assert found.coordinator == Address("fd00::1", 6000)


def test_one_node_needs_no_port() -> None:
    for words in ("", "--standalone", "--master_addr head", "--rdzv-backend c10d --rdzv-endpoint localhost:0"):
        assert options(words).coordinator is None


@pytest.mark.parametrize(
    ("environment", "here", "node"),
    [
        ({"SLURM_NODEID": "2"}, "elsewhere", 2),
        ({"GROUP_RANK": "1", "SLURM_NODEID": "2"}, "elsewhere", 1),
        ({"PET_NODE_RANK": "3", "SLURM_NODEID": "2"}, "elsewhere", 3),
        ({"JOB_COMPLETION_INDEX": "2"}, "elsewhere", 2),
        ({}, HEAD, 0),
    ],
)
def test_a_rank_where_torchrun_would_agree_on_one(environment: Mapping[str, str], here: str, node: int) -> None:
    words = "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint head:29401 --rdzv-id my/job"
    found = options(words, environment, here=here)
    assert (found.node, found.coordinator) == (node, Address(HEAD, 29401))
    assert found.run_dir == Path("resihp-runs/my-job")


def test_a_rank_of_two_nodes_and_of_the_host() -> None:
    words = "--rdzv_backend=c10d --rdzv_endpoint=head --nnodes="
    assert options(f"{words}2").node == 1, "the other one is the endpoint's"
    assert options(f"{words}4 --rdzv_conf is_host=1,join_timeout=900").node == 0
    assert options(f"{words}4 --rdzv_conf is_host=1,join_timeout=900").connect_timeout_s == 900.0
    assert options(f"{words}2").coordinator == Address(HEAD, 29400)
    assert "give --node-rank RANK or PET_NODE_RANK on each node, 0 at head" in refused(f"{words}4")


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_launcher_for_each_worker(name: str) -> None:
    """As scripts for torchrun-less starts have it. Each launcher would start a job, or wait for another one's end."""
    words = "--nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1"
    said = refused(words, {name: "3", "SLURM_NODEID": "1"})
    assert said.startswith(f"this is not the first task of its node ({name}=3)") and "--ntasks-per-node=1" in said
    assert "not the first task" in refused("", {name: "1"})
    assert options(words, {name: "0", "SLURM_NODEID": "1"}).node == 1
    assert options(f"{words} --node-rank 1", {name: "3"}).node == 1, "two nodes of a job on one machine"


def test_more_nodes_may_come() -> None:
    found = options("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint head:1 --rdzv-id a --max-restarts 3", here=HEAD)
    assert (found.nodes, found.late_nodes, found.max_restarts) == (2, 2, 3)


def test_workers_by_word() -> None:
    assert options("--nproc-per-node=gpu", gpus=4).workers_per_node == 4
    assert options("--nproc-per-node auto", gpus=0).workers_per_node == 4
    assert options("--nproc_per_node cpu").workers_per_node == 4
    assert "this machine shows no GPU; give how many" in refused("--nproc-per-node gpu", gpus=0)
    assert "--nproc-per-node many is not a number" in refused("--nproc-per-node many")


def test_where_output_goes() -> None:
    assert options("").logs == options("-r 3").logs == options("--tee 0").logs == "file"
    assert options("-t 3").logs == options("--tee 0:1,1:0").logs == "both"
    assert options("--logs prefix --tee 3").logs == "prefix"
    assert options("--log-dir out").runs == Path("out")
    found = options("--log_dir out --nnodes 2 --master_addr head --master_port 1 --rdzv_id a")
    assert found.run_dir == Path("out/a")


def test_variables_stand_for_flags() -> None:
    """Operators for Kubernetes set them."""
    environment = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": HEAD,
                   "PET_MASTER_PORT": "23456", "PET_MAX_RESTARTS": "2"}  # fmt: skip
    found = options("--nproc-per-node 2", environment)
    assert (found.nodes, found.node, found.workers_per_node, found.max_restarts) == (2, 1, 2, 2), "flags come first"
    assert found.coordinator == Address(HEAD, 23456)
    assert "PET_NODE_RANK=one is not a number" in refused("", {"PET_NODE_RANK": "one"})


def test_our_own_flags_come_first() -> None:
    words = "--nnodes 2 --coordinator other:1 --run-dir mine --connect-timeout 5"
    found = options(f"{words} --master-addr head --rdzv-conf timeout=900")
    assert (found.coordinator, found.run_dir, found.connect_timeout_s) == (Address("other", 1), Path("mine"), 5.0)


def test_how_torchrun_works_is_of_no_matter() -> None:
    words = "--monitor-interval 5 --start_method fork --role trainer --local_addr 10.0.0.1 --shutdown-timeout 60"
    assert options(f"{words} --event-log-handler null --run-path --use_env") == options("")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--no-python", "--no-python of torchrun is not supported; give a Python script"),
        ("--numa-binding node", "numactl"),
        ("--local_ranks_filter 0", "RUN_DIR/logs"),
        ("--virtual-local-rank", "LOCAL_RANK"),
        ("--rdzv-backend etcd --rdzv-endpoint head:2379", "give --rdzv-backend c10d"),
        ("--standalone --nnodes 2", "--standalone is for one node"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:0", "other nodes can't know"),
        ("--rdzv-conf fast", "is not KEY=VALUE"),
        ("--rdzv-conf timeout=long", "which is not a number"),
    ],
)
def test_what_a_user_would_miss_is_refused_with_what_to_do(words: str, said: str) -> None:
    assert said in refused(words)


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "main.py").touch()
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = options_of(parser.parse_args(["-m", "trainer.main", "--lr", "1"]), {})
    assert found.command == ("-m", "trainer.main", "--lr", "1")
    check(found)
