# SPDX-License-Identifier: Apache-2.0
"""An example of each message to the coordinator, in the order of a small job, and of each notice."""

from __future__ import annotations

from megatron_resihp.plan import Chunk, ParallelPlan, Shard
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.logs import (
    LogPage,
    LogsWanted,
    Scalar,
    TensorBoardWish,
    Text,
    WandbRow,
    WandbWish,
)
from megatron_resihp.protocol.messages import (
    CommunicationFailed,
    ConnectionLost,
    DrainRequest,
    EmergencyCheckpointWritten,
    EndRequest,
    EventsReported,
    FirstStepFailed,
    GroupsPrepared,
    HeartbeatsMissing,
    JobStarted,
    JoinRequest,
    LeaveRequest,
    Message,
    ModelBuilt,
    NodeLost,
    NodeReport,
    NodesDown,
    NoticeUnheard,
    PlanRequest,
    ProcessExited,
    Ready,
    SaveRequest,
    ScriptEnded,
    ScriptFailed,
    SlowdownRequest,
    StillSaving,
    StopRequest,
    Survivor,
    SurvivorReport,
    TrainingFinished,
    WorkerRestarted,
)
from megatron_resihp.protocol.notices import (
    NOTICES,
    DrainOrder,
    EpochIsBroken,
    JobEnds,
    MatrixProduct,
    NodeReleased,
    NoticesForgotten,
    OthersFinish,
    PlanChange,
    SaveOrder,
    SlownessChanged,
    StopTraining,
    ValidationOrder,
    WorkerDismissed,
    WorkersGivenUp,
    WorkersTakenIn,
)
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record

COUNTERS = {"iteration": 4, "consumed_train_samples": 16, "totals": {"lm loss": 1.0}}
OUTCOMES = {n: Outcome(0, 1.5, ((8.0, 4.0),), ("lm loss",)) for n in (4, 5)}
RECORD = Record(5, IterationPhase.COMPUTE, True, OUTCOMES, {4: COUNTERS, 5: COUNTERS}, 0, ("lm loss",))
PLAN = {
    "version": 2, "replicas": [{"stages": [[0], [2]], "micro_batches": [0, 1]},
                               {"stages": [[1], [3]], "micro_batches": [2, 3]}], "standbys": {},
}  # fmt: skip
EVENT = {"event": "iteration", "time": 9.0, "epoch": 0, "worker": 3, "iteration": 4, "duration_s": 0.5}
JOB = JobDescription(1, 2, 4, (Chunk(0, 0, 3), Chunk(1, 3, 6)), 8, False, True, train_iters=20)
LOGS = (TensorBoardWish("/logs", 1000), WandbWish("project", "name", None, "/wandb", {"seq_length": 32}, "1234abcd"))
TOLD: tuple[Message, ...] = (
    JobStarted(0, JOB),
    JoinRequest(5, JOB),
    ModelBuilt(0, {"num_layers": 6, "hidden_size": 64, "padded_vocab_size": 128, "num_attention_heads": 4}),
    *(Ready(worker, 0, {f"{worker // 2}/0": "a"}, (9000 + worker,), 0, 0) for worker in range(4)),
    CommunicationFailed(1, 0, "Connection closed by peer [127.0.0.1]:9000"),
    *(SurvivorReport(worker, 0, RECORD, (Shard(3 * (worker // 2), 3 * (worker // 2) + 3, 0, 1),))
      for worker in range(4)),
    NodeReport(0, RECORD, (Survivor(1, "1.1", (Shard(0, 3, 0, 1),), {5: {"started": 9.0}}),
                           Survivor(3, "3.1", (Shard(3, 6, 0, 1),), {}, (2,)))),
    StillSaving(1, 0),
    FirstStepFailed(1, 0, "ValueError: shards (2) must be >= 4"),
    LogsWanted(0, *LOGS),
    LogPage(3, 0, 4, 9.0, (Scalar("lm loss", 2.5, 4),), (Text("seed", "1", 0),), (WandbRow({"lm loss": 2.5}, 4),)),
    GroupsPrepared(1, 1),
    TrainingFinished(1, 3),
    EmergencyCheckpointWritten(1),
    ScriptEnded(1),
    ScriptFailed(1, "ValueError: no", 1),
    EventsReported(3, (EVENT,)),
    PlanRequest(PLAN, "by hand", patient=True, answer="answer/1"), PlanRequest(None, "worker 7 came back"),
    SlowdownRequest((1,), 0.5, answer="answer/2"),
    DrainRequest((1,), (0,), 20.0, "answer/3"),
    EndRequest(True, "answer/4"),
    ProcessExited(2, -9, 10.0),
    HeartbeatsMissing(2, 6.0, 10.0),
    NoticeUnheard(2, 0, 3.0, 10.0),
    ConnectionLost(2, 10.0),
    WorkerRestarted(6, 2, 10.0),
    NodeLost(1, "connection lost", 10.0),
    NodesDown((1,), 10.0),
    StopRequest(15, 10.0),
    LeaveRequest(1, 2, 10.0),
    SaveRequest(10.0),
)  # fmt: skip


PUBLISHED = (
    (NOTICES, EpochIsBroken(0, "worker 0 died")), (NOTICES, StopTraining(15)), (NOTICES, JobEnds(0, "finished")),
    (NOTICES, SlownessChanged(True, ((1, 0.5),))), (NOTICES, PlanChange(1, 0, ParallelPlan.from_dict(PLAN))),
    (NOTICES, ValidationOrder(1, 0, (MatrixProduct((0, 1), 8, 8, 8),))),
    (NOTICES, WorkersTakenIn(1, (5,))), (NOTICES, WorkersGivenUp((1,), "silent")),
    (NOTICES, WorkerDismissed(1, "too late")), (NOTICES, NodeReleased(0, (0, 1))), (NOTICES, SaveOrder(1)),
    (NOTICES, OthersFinish()), (NOTICES, DrainOrder((2, 3))), (NOTICES, NoticesForgotten(3)),
)  # fmt: skip
