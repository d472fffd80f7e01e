# SPDX-License-Identifier: Apache-2.0
"""The example for Kubernetes: it is a JobSet, and its script does for a pod what its page says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.launch.launch_options import LaunchOptions
from megatron_resihp.control.commands.launch.run_directory import JOB_ENDED
from megatron_resihp.control.transport.leaders import RESULT

ROOT = Path(__file__).parents[3]
SCHEMA = "JOBSET_DIR"
"""A checkout of github.com/kubernetes-sigs/jobset."""
CRD = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
WAIT_S = 30.0


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "scripts/kubernetes/jobset.yaml").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def job(manifest: dict[str, Any]) -> dict[str, Any]:
    [replicated] = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


@pytest.fixture
def container(job: dict[str, Any]) -> dict[str, Any]:
    [only] = job["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def closed(schema: Any) -> Any:
    """The schema, which now also refuses fields that it does not name: Kubernetes would drop those without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


@pytest.mark.skipif(SCHEMA not in os.environ, reason=f"{SCHEMA} names no checkout of kubernetes-sigs/jobset")
def test_is_what_the_schema_asks_for(manifest: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="there is no jsonschema")
    definition = yaml.safe_load(Path(os.environ[SCHEMA], CRD).read_text())
    [schema] = [
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if version["name"] == manifest["apiVersion"].rpartition("/")[2]
    ]
    check = closed(schema)
    check["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    jsonschema.validate(manifest, check)
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 1
    with pytest.raises(jsonschema.ValidationError, match="backoffLimits"):
        jsonschema.validate(manifest, check)


def test_kubernetes_tries_again_what_may_go_well_the_next_time(job: dict[str, Any]) -> None:
    fatal = {exit_codes.FAILED, exit_codes.REFUSED, exit_codes.NO_PLAN}
    [ending] = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert set(ending["onExitCodes"]["values"]) == fatal
    assert not fatal & {exit_codes.RETRY, exit_codes.stopped_by(signal.SIGUSR1)}


def test_a_pod_has_time_to_leave_and_all_know_how_many_there_are(
    job: dict[str, Any], container: dict[str, Any]
) -> None:
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > LaunchOptions.drain_deadline_s
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["NODES"])


class Pods:
    """Runs the script of a pod, with commands that only note how they are called in the place of `resihp`."""

    def __init__(self, container: dict[str, Any], folder: Path) -> None:
        self._command = [*container["command"], "train.py", "--resihp"]
        self._bin, self.run_dir = folder / "bin", folder / "run"
        self._bin.mkdir()
        self.node0 = socket.create_server(("127.0.0.1", 0))
        self._environment = {
            "PATH": f"{self._bin}:{os.environ['PATH']}", "NODES": "2", "RUN_DIR": str(self.run_dir),
            "COORDINATOR": f"127.0.0.1:{self.node0.getsockname()[1]}", "CHECKPOINTS": "/saved", "RESIHP_LAUNCH": "--x",
            "END_LOOKS": "1", "BEAT_S": "0.1", "BEATS_S": "1",
        }  # fmt: skip

    def run(self, rank: int, launch: str, **variables: str) -> subprocess.Popen[str]:
        """The script of a pod. `launch`: what the launcher does, in bash."""
        command = self._bin / "resihp"
        command.write_text(
            f'#!/bin/bash\necho "$@" >>{self._bin}/called\n'
            '[[ $1 != checkpoint ]] || { echo --load; echo "/a state"; }\n'
            f"[[ $1 != launch ]] || {{ {launch}; }}\n"
        )
        command.chmod(0o755)
        environment = {**self._environment, "NODE_RANK": str(rank), **variables}
        return subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE, text=True)

    def code(self, rank: int, launch: str, **variables: str) -> int:
        pod = self.run(rank, launch, **variables)
        pod.communicate(timeout=WAIT_S)
        return pod.returncode

    def called(self) -> list[str]:
        called = self._bin / "called"
        return called.read_text().splitlines() if called.exists() else []

    def close(self) -> None:
        self.node0.close()


@pytest.fixture
def pods(container: dict[str, Any], tmp_path: Path) -> Iterator[Pods]:
    with closing(Pods(container, tmp_path)) as made:
        yield made


def test_all_pods_launch_with_the_flags_that_node_0_has_found(pods: Pods) -> None:
    assert pods.code(0, "exit 0") == 0
    assert pods.code(1, "exit 75") == 75
    look, *launches = pods.called()
    assert look == f"checkpoint {pods.run_dir} --newer-than /saved --flags"
    assert [line.replace("--node-rank 1", "--node-rank 0") for line in launches] == 2 * launches[:1]
    assert launches[0].endswith("--x train.py --resihp --save /saved --load /saved --load /a state")


def test_a_pod_launches_nothing_before_node_0_has_its_port(pods: Pods) -> None:
    """Flags that are there by then are those of the start before."""
    assert pods.code(0, "exit 0") == 0
    launched = pods.called()
    pods.node0.close()
    assert pods.code(1, "exit 0", PORT_LOOKS="1") == 75
    assert pods.called() == launched


def test_a_pod_launches_nothing_without_the_flags_of_node_0(pods: Pods) -> None:
    pods.run_dir.mkdir()
    assert pods.code(1, "echo launched; exit 0") == 75
    assert not pods.called()


def test_a_new_node_0_looks_for_a_state_once_survivors_have_saved_it(pods: Pods) -> None:
    saves = f"until [[ -f {pods.run_dir}/saved ]]; do sleep 0.05; done; echo saved >>${{0%/*}}/called; exit 75"
    launch = f"[[ $7 != 0 ]] || exit 0; {saves}"
    assert pods.code(0, launch) == 0
    survivor = pods.run(1, launch)
    beat, deadline = pods.run_dir / "nodes" / "1", time.monotonic() + WAIT_S
    while not beat.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    replacement = pods.run(0, launch)
    with pytest.raises(subprocess.TimeoutExpired):
        replacement.communicate(timeout=3.0)
    (pods.run_dir / "saved").touch()
    assert survivor.wait(WAIT_S) == 75 and replacement.wait(WAIT_S) == 0
    first_look, *_, saved, look, _ = pods.called()
    assert (saved, look) == ("saved", first_look)
    assert not beat.exists()


def test_a_new_node_0_waits_for_a_survivor_that_is_just_saying_that_it_is_there(pods: Pods) -> None:
    """Its file is empty for a moment."""
    assert pods.code(0, "exit 0") == 0
    beat = pods.run_dir / "nodes" / "1"
    beat.touch()
    replacement = pods.run(0, "exit 0", BEATS_S="2")
    with pytest.raises(subprocess.TimeoutExpired):
        replacement.communicate(timeout=1.0)
    beat.unlink()
    assert replacement.wait(WAIT_S) == 0


def test_a_new_node_0_does_not_wait_for_nodes_that_were_killed(pods: Pods) -> None:
    (pods.run_dir / "nodes").mkdir(parents=True)
    (pods.run_dir / "nodes" / "1").write_text("300\n")
    assert pods.code(0, "exit 0") == 0


@pytest.mark.parametrize(
    ("rank", "ended", "job_ended", "code"),
    [
        (0, 1, None, 1), (1, 1, None, 3), (1, 2, None, 3), (1, 75, None, 75), (1, 1, 1, 1), (1, 0, None, 3),
        (1, 0, 0, 0), (1, 2, 0, 0), (1, 2, 75, 75), (0, 0, None, 0),
    ],
)  # fmt: skip
def test_a_node_that_leaves_or_fails_alone_does_not_end_the_job(
    pods: Pods, rank: int, ended: int, job_ended: int | None, code: int
) -> None:
    """A pod that ends with 0 would not be replaced; one that came too late for the end must not make it a failure."""
    assert pods.code(0, "exit 0") == 0
    over = "" if job_ended is None else f"echo {job_ended} >{pods.run_dir}/exit_code; "
    assert pods.code(rank, f"{over}exit {ended}") == code


def test_a_pod_whose_job_has_ended_is_not_replaced_before_node_0_has_closed_its_port(pods: Pods) -> None:
    """The new pod would ask the old node 0 for a place."""
    assert pods.code(0, "exit 0") == 0
    ended = pods.run_dir / JOB_ENDED
    ended.mkdir()
    (ended / "node_1").write_text("75\n")
    pod = pods.run(1, "exit 75", END_LOOKS="1000")
    with pytest.raises(subprocess.TimeoutExpired):
        pod.communicate(timeout=2.0)
    (pods.run_dir / RESULT).write_text("75\n")
    assert pod.wait(WAIT_S) == 75


def test_a_pod_that_is_told_to_end_and_has_left_is_replaced(pods: Pods) -> None:
    assert pods.code(0, "exit 0") == 0
    pod = pods.run(1, "trap 'exit 0' TERM; echo here; while :; do sleep 0.05; done")
    assert pod.stdout is not None and pod.stdout.readline() == "here\n"
    pod.terminate()
    assert pod.communicate(timeout=WAIT_S)[0] == "resihp: this node ended with 0 alone\n" and pod.returncode == 3


def test_a_pod_that_is_told_to_end_waits_until_its_node_has_left(pods: Pods) -> None:
    pod = pods.run(0, "trap 'echo leaving; exit 143' TERM; echo here; while :; do sleep 0.05; done")
    assert pod.stdout is not None and pod.stdout.readline() == "here\n"
    pod.terminate()
    assert pod.communicate(timeout=WAIT_S)[0] == "leaving\n" and pod.returncode == 143
