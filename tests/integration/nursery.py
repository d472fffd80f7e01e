# SPDX-License-Identifier: Apache-2.0
"""The nursery: one process that has imported everything once, and forks a launcher for each job that it is asked for.

Executed by `jobs.Nursery`: `python nursery.py SCRIPT`, with a line of JSON for each job on standard input. May import
megatron and everything of this package, but after the stand-in is in place.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

MOCK_DATA_SIZE: Final = 1000
DUMP_SIGNAL: Final = signal.SIGXCPU
"""That workers write the stacks of their threads at."""
SEED_SETTERS: Final = (
    "megatron.training",
    "megatron_resihp.control.node",
    "megatron_resihp.integration.enable",
    "megatron_resihp.integration.loop",
    "megatron_resihp.integration.modes",
    "megatron_resihp.integration.patches",
    "torch.cuda",
    "torch.random",
)
"""Modules from which seeds are set."""
SUSPECTS: Final = (0, 1)
"""Workers that a judge which "suspects" cannot tell apart."""


def _nursery() -> NoReturn:
    """Fork a launcher per request line, say how each ended; killed with all of them when the requests end."""
    import selectors

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _warm_up()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, None)
    running: dict[int, str] = {}
    unread = b""
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                _, status, used = os.wait4(key.data, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                answer = {"run_dir": running.pop(key.data), "pid": key.data, "code": os.waitstatus_to_exitcode(status)}
                print(json.dumps(answer | {"cpu_s": used.ru_utime + used.ru_stime}), file=answers, flush=True)
                continue
            data = os.read(0, 65536)
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    _become_launcher(request)
                running[pid] = request["run_dir"]
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                print(json.dumps({"run_dir": request["run_dir"], "pid": pid}), file=answers, flush=True)


def _warm_up() -> None:
    import gc
    import runpy

    import megatron_resihp

    megatron_resihp.enable()
    import torch._dynamo  # noqa: F401

    runpy.run_path(sys.argv[1], run_name="warm_up")
    _import_what_jobs_import_late()
    _read_event_classes()
    _save_megatron_some_work()
    _save_torch_some_work()
    _keep_spawned_processes_small()
    # A collection in a worker would write to every object, and so copy all of this process's memory.
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def _import_what_jobs_import_late() -> None:
    import multiprocessing.managers
    import multiprocessing.pool
    import multiprocessing.queues  # noqa: F401

    import megatron.core.datasets.helpers
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.libraries
    import megatron.core.tokenizers.text.models.default_tokenizer
    import megatron.core.tokenizers.text.models.gpt_tokenizer  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import megatron_resihp.cli
    import megatron_resihp.detector.service
    import megatron_resihp.integration.patches.experts.additional_rounds
    import megatron_resihp.integration.patches.experts.uneven
    import megatron_resihp.integration.patches.training
    import megatron_resihp.integration.probes.injection_points
    import megatron_resihp.integration.streams.patches
    import megatron_resihp.report.run.terminal  # noqa: F401


def _save_megatron_some_work() -> None:
    """Two thirds of the time that a worker takes to start: help texts are kept, and mock data has an index of thousands
    of samples in place of millions.
    """
    from argparse import ArgumentParser

    from help_texts import keep_help_texts
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training.arguments import add_megatron_arguments

    keep_help_texts()
    add_megatron_arguments(ArgumentParser())
    MockGPTLowLevelDataset.size = MOCK_DATA_SIZE


def _save_torch_some_work() -> None:
    """Each worker would read the metadata of all installed packages to find gloo and, where CUDA has not begun, the
    sources of the modules that set seeds: torch keeps the stack of each such call.
    """
    import linecache

    from torch.distributed.distributed_c10d import Backend, BackendConfig

    BackendConfig(Backend("gloo"))
    for name, module in list(sys.modules.items()):
        if name.startswith(SEED_SETTERS) and getattr(module, "__file__", None):
            linecache.getlines(str(module.__file__))


def _read_event_classes() -> None:
    from megatron_resihp.events.catalogue import EVENTS
    from megatron_resihp.events.fields import fields_of

    for event in EVENTS.values():
        fields_of(event)


def _keep_spawned_processes_small() -> None:
    """Each worker that saves a checkpoint starts processes, one that keeps a queue, and these would import the training
    script, and Megatron with it.
    """
    from multiprocessing import spawn, util

    from forked_worker import fork_python

    everything = spawn.get_preparation_data

    def needed(name: str) -> dict[str, Any]:
        return {key: value for key, value in everything(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = needed
    util.spawnv_passfds = fork_python


def _become_launcher(request: dict[str, Any]) -> NoReturn:
    code = 99
    try:
        from forked_worker import fork_worker
        from plain_job import launch_plain

        from megatron_resihp.cli import RunReport
        from megatron_resihp.control import linux, streams
        from megatron_resihp.control.commands.launch import launcher
        from megatron_resihp.control.commands.launch.launch_options import LaunchOptions
        from megatron_resihp.control.transport.address import Address
        from megatron_resihp.control.transport.etcd.location import parse_location

        linux.die_with_parent()
        os.setsid()
        run_dir = Path(request.pop("run_dir"))
        output = os.open(run_dir.with_name(f"{run_dir.name}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # The nursery's requests and its other descriptors are not for the job.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        streams.let_no_output_end_this()
        _enter_network(request.pop("network", None))
        os.environ.update(request.pop("environment", {}))
        _take_notes(run_dir)
        _spoil_judge(request.pop("judge", None))
        command = tuple(request.pop("command"))
        if request.pop("without_plugin", False):
            os._exit(launch_plain(command, request["workers_per_node"], run_dir))
        if "coordinator" in request:
            request["coordinator"] = Address(*request["coordinator"])
        if "control" in request:
            request["control"] = parse_location(request["control"])
        options = LaunchOptions(command=command, run_dir=run_dir, stand_in=True, **request)
        code = launcher.launch(options, fork_worker, RunReport)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _enter_network(name: str | None) -> None:
    """A namespace of `networks`, whose address is no host name's."""
    if name is not None:
        os.setns(os.open(f"/run/netns/{name}", os.O_RDONLY), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _take_notes(run_dir: Path) -> None:
    """Write down each worker's process and exit code, and let workers say where they hang when asked to."""
    import faulthandler

    from megatron_resihp.control.node import bootstrap
    from megatron_resihp.control.node.agent import Agent

    def append(name: str, *words: Any) -> None:
        with open(run_dir / name, "a") as notes:
            notes.write(" ".join(map(str, words)) + "\n")

    bury, main = Agent._bury, bootstrap.main

    def noted_bury(agent: Agent, worker: Any) -> None:
        bury(agent, worker)
        append("exits", worker.number, worker.code)

    def noted_main(command: Sequence[str]) -> NoReturn:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        append("pids", os.environ["RESIHP_WORKER"], os.getpid())
        main(command)

    Agent._bury = noted_bury  # type: ignore[method-assign]
    bootstrap.main = noted_main


def _spoil_judge(how: str | None) -> None:
    import threading

    from megatron_resihp.detector.monitor import Monitor
    from megatron_resihp.detector.service import DetectionService
    from megatron_resihp.detector.validation import Suspicion

    def fail(*_: Any) -> NoReturn:
        raise RuntimeError("the judge fails")

    def hang(*_: Any) -> None:
        threading.Event().wait()

    if how == "suspects":
        Monitor.suspicions = lambda self: [Suspicion(SUSPECTS, 0.3, 1, 1)]  # type: ignore[method-assign]
    elif how is not None:
        DetectionService.take = {"fails": fail, "hangs": hang}[how]  # type: ignore[assignment]


if __name__ == "__main__":
    _nursery()
