# SPDX-License-Identifier: Apache-2.0
"""A worker without Megatron: it talks to the coordinator as a training process does, and computes nothing.

Run by test_launcher.py, which steers it with files in RUN_DIR: `finish` lets all workers reach the end, `fail_3` makes
worker 3 raise, `crash_3` end without a word, `deaf_3` ignore an order to stop, `hang_3` outlive SIGTERM. At the start
`idle_3` makes it do nothing for now, `breed_3` start children, and `knock_3` connect to the port that the file holds;
`dawdle_3` keeps it from getting ready for an epoch, `mute_3` from reporting when one has broken, and with
`time_out_3_in_0` it takes it in epoch 0 that communication has failed. `slow_save_3` keeps it from ending an emergency
save. `job` holds what is to be told of the job, and `events` what worker 0 tells when training begins.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from megatron_resihp.control.node import environment
from megatron_resihp.control.node.environment import SLOTS
from megatron_resihp.control.transport.store.client import StoreClient, open_connection
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.errors import EpochBroken, JobEnded, UnreachableError
from megatron_resihp.control.worker.heard import NO_EPOCH
from megatron_resihp.control.worker.own_address import own_address_towards
from megatron_resihp.control.worker.reach import Door
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.plan.slots import node_of
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import EmergencyCheckpointWritten, JobStarted, ModelBuilt, TrainingFinished
from megatron_resihp.protocol.published import EmergencyCheckpointOrder, EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Record

WORKER = int(os.environ["RESIHP_WORKER"])
NEWCOMER = int(os.environ["RANK"]) != WORKER
RUN_DIR = Path(os.environ["RESIHP_RUN_DIR"])
TICK_S = 0.01
ANSWERED_S = 30.0
JOB = JobDescription(
    tensor_parallel=1, pipeline_parallel=1, micro_batches=12, chunks=(Chunk(0, 0, 4),), seq_length=8,
    sequence_parallel=False, pipeline_last=True, train_iters=5, micro_batch_size=1, global_batch_size=12,
)  # fmt: skip

MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8,
    "padded_vocab_size": 32,
}  # fmt: skip


def asked(what: str) -> bool:
    return (RUN_DIR / what).exists()


def begin(control: WorkerControl, plan: ParallelPlan) -> None:
    while asked(f"dawdle_{WORKER}"):
        time.sleep(TICK_S)
    control.ready(digests={"0/0": "same"}, bytes_received=0, steps_redone=0, ports=[])
    print(f"epoch {control.epoch} members {list(plan.members)} pid {os.getpid()}", flush=True)


def recover(control: WorkerControl, plan: ParallelPlan) -> ParallelPlan:
    while asked(f"mute_{WORKER}"):
        time.sleep(TICK_S)
    record = Record(iteration=1, stage=IterationPhase.COMPUTE, counters={0: {}, 1: {}})
    held = plan.coordinate_of(WORKER)
    while True:
        order = control.report(record, shards_at([Chunk(0, 0, 4)], held, 1) if held else ())
        if isinstance(order, EmergencyCheckpointOrder):
            while asked(f"slow_save_{WORKER}"):
                time.sleep(TICK_S)
            control.tell(EmergencyCheckpointWritten(WORKER))
            raise control.heard.await_end()
        assert isinstance(order, EpochPlan)
        try:
            control.check_reach(order.plan)
            return order.plan
        except UnreachableError as error:
            control.suspect(error, ANSWERED_S)


def train(control: WorkerControl, news: threading.Event) -> None:
    plan = join(control) if NEWCOMER else control.first_plan()
    control.doors.cut_off(plan.members)  # to know whom it can reach
    while True:
        try:
            begin(control, plan)
            saved = 0
            while not (asked("finish") or (control.heard.stop_signal and not asked(f"deaf_{WORKER}"))):
                news.wait(TICK_S)
                if control.heard.to_save > saved:
                    saved = control.heard.to_save
                    print(f"save {saved}", flush=True)
                if asked(f"time_out_{WORKER}_in_{control.epoch}"):
                    control.suspect(RuntimeError("gloo: Timed out waiting 600000ms for recv operation"), ANSWERED_S)
                control.heard.check()
                if control.heard.change.of_epoch(control.epoch) is not None:
                    control.heard.change.drop(control.heard.change.of_epoch(control.epoch))
                    plan = recover(control, plan)
                    begin(control, plan)
                if asked(f"fail_{WORKER}"):
                    raise ValueError("the loss is no number\nand more")
                if asked(f"crash_{WORKER}"):
                    os._exit(3)
            return
        except EpochBroken:
            news.clear()
            plan = recover(control, plan)


def join(control: WorkerControl) -> ParallelPlan:
    order = control.join(told_of_the_job())
    assert isinstance(order, EpochPlan) and not order.held[WORKER]
    return order.plan


def told_of_the_job() -> JobDescription:
    return replace(JOB, **(json.loads((RUN_DIR / "job").read_text()) if asked("job") else {}))


def breed() -> None:
    """One child as data loaders are started, one as tools are."""
    forked = os.fork()
    if forked == 0:
        while True:
            signal.pause()
    executed = subprocess.Popen(["sleep", "600"])
    print(f"children {forked} {executed.pid}", flush=True)


def main() -> None:
    print(f"arguments {sys.argv[1:]} rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    print(f"store {os.environ['RESIHP_STORE']}", flush=True)
    print(f"process {os.getpid()}", flush=True)
    while asked(f"idle_{WORKER}"):
        time.sleep(TICK_S)
    if asked(f"hang_{WORKER}"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked(f"breed_{WORKER}"):
        breed()
    if asked(f"knock_{WORKER}"):
        port = int((RUN_DIR / f"knock_{WORKER}").read_text())
        connection = socket.create_connection(("127.0.0.1", port))  # noqa: F841  # Held open.
    client = StoreClient(open_connection(environment.way_to_store(), 30.0))
    store = LastingStore(client) if client.connection.way.leaders is not None else client
    news = threading.Event()
    door = Door(own_address_towards(store.address.host)).address
    slots, here = int(os.environ[SLOTS]), int(os.environ["LOCAL_WORLD_SIZE"])
    control = WorkerControl(
        store, WORKER, news.set, NO_EPOCH if NEWCOMER else 0, door, lambda worker: node_of(worker, slots, here)
    )
    if not NEWCOMER:
        control.tell(JobStarted(WORKER, told_of_the_job()))
        control.tell(ModelBuilt(WORKER, MODEL))
    try:
        train(control, news)
        control.tell(TrainingFinished(WORKER, told_of_the_job().train_iters or 0))
    except JobEnded as end:
        print(f"ended: {end}", flush=True)
        while asked(f"hang_{WORKER}"):
            signal.pause()
        sys.exit(end.code)


if __name__ == "__main__":
    main()
