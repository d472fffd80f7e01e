# SPDX-License-Identifier: Apache-2.0
"""A real SLURM of a few nodes on this machine: each node is a network namespace with a slurmd of its own.

slurmctld has a namespace too, so that it outlives every node. May import the integration tests' networks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from networks import Network

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter")
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS),
    reason="a SLURM is made by root, with slurmctld, slurmd, slurm-client and munge (scripts/cluster_tests.sh)",
)
START_S = 30.0
CONFIGURATION = """\
ClusterName=resihp
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket,cred_expire=5
StateSaveLocation={state}/control
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=5
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=8 Gres=gpu:{workers} State=UNKNOWN"


class Slurm:
    """slurmctld and a slurmd on each node. Nodes are called n0, n1, ...; they say that they have `workers` GPUs each.

    Args:
        state: an empty directory, for the daemons' files.
    """

    def __init__(self, state: Path, nodes: int, workers: int) -> None:
        self._state = state
        self._network = Network(nodes + 1)
        self.nodes = [f"n{number}" for number in range(nodes)]
        self._machines = [*self.nodes, "control"]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start(workers)
        except BaseException:
            self.close()
            raise

    def address(self, node: str) -> str:
        return self._network.address(self._machines.index(node))

    def states(self) -> dict[str, str]:
        """What SLURM says of each node."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {node: state.upper().rstrip("*") for node, state in map(str.split, lines)}

    def submit(self, *arguments: str, directory: Path, environment: Mapping[str, str]) -> int:
        """Submit a batch script from that directory; its number."""
        answer = self.ask("sbatch", "--parsable", *arguments, directory=directory, environment=environment)
        return int(answer.strip())

    def job(self, number: int) -> dict[str, str]:
        """What SLURM says of a job: JobState, ExitCode, Restarts, NodeList, ..."""
        (job,) = self.jobs(number)
        return job

    def jobs(self, number: int) -> list[dict[str, str]]:
        """The same of each job of an array."""
        lines = self.ask("scontrol", "--oneliner", "show", "job", str(number)).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]

    def await_state(self, number: int, *states: str, timeout_s: float) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        self.eventually(
            f"job {number} is {' or '.join(states)}", lambda: self.job(number)["JobState"] in states, timeout_s
        )
        return self.job(number)

    def ask(self, *command: str, directory: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
        """The output of one of SLURM's commands, run where slurmctld runs."""
        done = subprocess.run(
            self._on("control", command), env=self._environment(environment or {}), cwd=directory,
            capture_output=True, text=True, timeout=30.0,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
        return done.stdout

    def lose(self, node: str) -> None:
        """The node loses its power: all its processes are gone at once."""
        for pid in self._pids(node):
            kill(pid)
        self._daemons[node].wait(10.0)

    def lose_daemon(self, node: str) -> None:
        """slurmd is killed; the job's processes run on."""
        self._daemons[node].kill()
        self._daemons[node].wait(10.0)

    def start(self, node: str) -> None:
        """The node is there again, as it is after its start."""
        self._daemons[node] = self._daemon(node, "slurmd", "-D", "-N", node)

    def drain(self, node: str) -> None:
        """As an administrator does; jobs on it run on."""
        self.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a test")

    def restore(self) -> None:
        """No job runs, and all nodes are idle."""
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        self.ask("scancel", "--user=root")
        for node in self.nodes:
            if node not in self._daemons or self._daemons[node].poll() is not None:
                self.start(node)
        for node in [node for node, state in self.states().items() if state.startswith("DRAIN")]:
            self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.eventually("all nodes are idle", lambda: set(self.states().values()) == {"IDLE"}, START_S)

    def eventually(self, what: str, test: Callable[[], Any], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not test():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        texts = {path.name: path.read_text(errors="replace") for path in sorted(self._state.glob("*.log"))}
        return "\n".join(f"---- {name}\n" + "\n".join(text.splitlines()[-15:]) for name, text in texts.items())

    def close(self) -> None:
        for machine in self._machines:
            for pid in self._pids(machine):
                kill(pid)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait(10.0)
        self._network.close()

    def _start(self, workers: int) -> None:
        self._write_files(workers)
        self._start_munge()
        self._daemons["control"] = self._daemon("control", "slurmctld", "-D")
        self.restore()

    def _namespace(self, machine: str) -> str:
        return self._network.names[self._machines.index(machine)]

    def _pids(self, machine: str) -> list[int]:
        """All processes on a machine."""
        namespace = os.stat(f"/run/netns/{self._namespace(machine)}").st_ino
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(process / "ns" / "net").st_ino == namespace:
                    found.append(int(process.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def _on(self, machine: str, command: Sequence[str]) -> list[str]:
        """A command with that machine's network, its name, and /etc/hosts of all machines."""
        into = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        separate = ["nsenter", f"--net=/run/netns/{self._namespace(machine)}", "unshare", "--uts", "--mount"]
        return [*separate, "bash", "-c", into, str(self._state / "hosts"), machine, *command]

    def _environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self._state / "slurm.conf")} | changes

    def _daemon(self, machine: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._state / f"{machine}.out").open("ab") as output:
            return subprocess.Popen(
                self._on(machine, command), env=self._environment({}), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def _write_files(self, workers: int) -> None:
        for name in ("control", "munge", *self.nodes):
            (self._state / name).mkdir(mode=0o700)
        hosts = [f"{self.address(machine)} {machine}" for machine in self._machines]
        (self._state / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        nodes = "\n".join(NODE.format(name=node, address=self.address(node), workers=workers) for node in self.nodes)
        text = CONFIGURATION.format(control=self.address("control"), state=self._state, nodes=nodes)
        (self._state / "slurm.conf").write_text(text)
        devices = [self._state / f"gpu{number}" for number in range(workers)]
        for device in devices:
            os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null is
        (self._state / "gres.conf").write_text(f"Name=gpu File={','.join(map(str, devices))}\n")

    def _start_munge(self) -> None:
        place = self._state / "munge"
        key = place / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        files = [
            f"--{option}={place / option.partition('-')[0]}"
            for option in ("socket", "pid-file", "log-file", "seed-file")
        ]
        command = ["munged", "--foreground", "--force", f"--key-file={key}", *files]
        self._daemons["munge"] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.eventually("munged answers", (place / "socket").exists, START_S)


def kill(pid: int) -> None:
    """Kill a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
