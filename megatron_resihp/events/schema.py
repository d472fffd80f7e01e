# SPDX-License-Identifier: Apache-2.0
"""What every event holds: one table that checks events and writes docs/events.md.

`python -m megatron_resihp.events.schema > docs/events.md` writes the page anew.
May import: the standard library and this package's event names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from megatron_resihp.events import log as names
from megatron_resihp.events.nonfinite import is_number


class Kind(NamedTuple):
    """A type of value: what the page calls it, and the test for it."""

    label: str
    accepts: Callable[[Any], bool]


class Field(NamedTuple):
    name: str
    kind: Kind
    meaning: str
    required: bool = True
    """A reader ignores an event that lacks a required field; any other may be null or missing."""


class EventSchema(NamedTuple):
    written_by: str
    meaning: str
    fields: tuple[Field, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(test(item) for item in value)


def _is_range(value: Any) -> bool:
    return _is_list_of(_is_int)(value) and len(value) == 2 and value[0] <= value[1]


def _is_named_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(is_number(item) for item in value.values())


def _is_replica(value: Any) -> bool:
    return isinstance(value, Mapping) and _is_list_of(_is_list_of(_is_int))(value.get("stages"))


def _is_plan(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _is_list_of(_is_replica)(value.get("replicas")):
        return False
    return isinstance(value.get("standbys") or {}, Mapping)


INTEGER: Final = Kind("integer", _is_int)
NUMBER: Final = Kind("number", is_number)
TEXT: Final = Kind("string", lambda value: isinstance(value, str))
FLAG: Final = Kind("true or false", lambda value: isinstance(value, bool))
NAME: Final = Kind("integer or string", lambda value: _is_int(value) or isinstance(value, str))
INTEGERS: Final = Kind("list of integers", _is_list_of(_is_int))
NUMBERS: Final = Kind("list of numbers", _is_list_of(is_number))
LIST: Final = Kind("list", lambda value: isinstance(value, (list, tuple)))
TEXTS: Final = Kind("list of strings", _is_list_of(lambda value: isinstance(value, str)))
PAIRS: Final = Kind("list of [integer, integer]", _is_list_of(lambda v: _is_list_of(_is_int)(v) and len(v) == 2))
RANGES: Final = Kind("list of [first, last]", _is_list_of(_is_range))
NAMED_NUMBERS: Final = Kind("object of numbers", _is_named_numbers)
OBJECT: Final = Kind("object", lambda value: isinstance(value, Mapping))
PLAN: Final = Kind("plan", _is_plan)

COMMON: Final = (
    Field("event", TEXT, "the event's name"),
    Field("time", NUMBER, "when it happened, in Unix seconds"),
    Field("epoch", INTEGER, "the epoch that the writer was in", required=False),
    Field("worker", INTEGER, "id of the worker that wrote it; null: the coordinator", required=False),
)

_ITERATION_FIELDS: Final = (
    Field("iteration", INTEGER, "number of the completed step, from 1"),
    Field("loss", NAMED_NUMBERS, "loss by name, averaged over the global batch", required=False),
    Field("grad_norm", NUMBER, "norm of the whole gradient", required=False),
    Field("skipped", FLAG, "the step was skipped: a gradient had overflowed in half precision", required=False),
    Field("agreed_epoch", INTEGER, "the epoch whose attempt was agreed; without it, `epoch` is", required=False),
)

_RECOMMENDED: Final = (
    Field("why", TEXT, "who is slow, and what is gained"),
    Field("gain", NUMBER, "share of an iteration's pipelines that is saved"),
    Field("lost_s", NUMBER, "seconds lost so far by not having changed", required=False),
    Field("cost_s", NUMBER, "seconds that the change costs", required=False),
    Field("iteration_s", NUMBER, "seconds of an iteration's pipelines afterwards, by simulation", required=False),
)

EVENTS: Final[Mapping[str, EventSchema]] = {
    names.RUN_STARTED: EventSchema(
        "coordinator",
        "The launcher has started. A log that holds several runs is read from the last of these.",
        (
            Field("world_size", INTEGER, "workers at the start"),
            Field("nnodes", INTEGER, "nodes at the start", required=False),
            Field("most_nodes", INTEGER, "those and the nodes that may join later", required=False),
            Field("nproc_per_node", INTEGER, "workers per node", required=False),
            Field("command", TEXTS, "the command line of a worker", required=False),
        ),
    ),
    names.JOB: EventSchema(
        "a worker",
        "Megatron's arguments are known. The first of a run counts.",
        (
            Field("tensor_parallel", INTEGER, "tensor-parallel degree at the start", required=False),
            Field("pipeline_parallel", INTEGER, "pipeline stages at the start", required=False),
            Field("chunks", LIST, "`[stage, first, end]`: the layers of each stage at the start", required=False),
            Field("micro_batch_size", INTEGER, "samples in a micro-batch", required=False),
            Field("global_batch_size", INTEGER, "samples in an iteration"),
            Field("micro_batches", INTEGER, "micro-batches in an iteration, over all replicas", required=False),
            Field("seq_length", INTEGER, "tokens in a sample", required=False),
            Field("sequence_parallel", FLAG, "members of a stage share the tokens between layers", required=False),
            Field("train_iters", INTEGER, "iterations to reach"),
            Field("eval_interval", INTEGER, "iterations from one evaluation to the next; null: none", required=False),
            Field("save_interval", INTEGER, "iterations from one checkpoint to the next; null: none", required=False),
            Field("distributed_optimizer", FLAG, "replicas share the optimizer's state out", required=False),
            Field("strategy", TEXT, "who plans when workers die", required=False),
            Field("plan_wait", NUMBER, "how long a recovery waits for that, in seconds", required=False),
            Field("act", TEXT, "what is done when another plan is faster: observe, ask or act", required=False),
            Field("seconds_between_changes", NUMBER, "least time between changes by choice", required=False),
            Field("device_memory", INTEGER, "bytes of each device; null: not known", required=False),
            Field("memory_reserve", NUMBER, "percent of that which plans leave free", required=False),
            Field("gemm", INTEGERS, "m, n and k of a matrix product of the training", required=False),
            Field("transfer_bytes", INTEGER, "size of a micro-batch's activations", required=False),
            Field("false_alarms_per_job", NUMBER, "what the detector may get wrong, on average", required=False),
            Field("cost_model", TEXT, "file that the detector was to start from; null: none named", required=False),
            Field("emulated", TEXT, "device profile of the emulated clock; null: none", required=False),
            Field(
                "first_iteration",
                INTEGER,
                "iteration already done at the start; missing: as the first step shows",
                required=False,
            ),
        ),
    ),
    names.EPOCH_STARTED: EventSchema(
        "coordinator",
        "An epoch's plan is in force.",
        (
            Field(
                "plan",
                PLAN,
                '`{"replicas": [{"stages": [[worker ids of the TP members], ...], "micro_batches": [indices]}], '
                '"standbys": {worker id: [stage, tp_rank] or null}}`',
            ),
            Field("digest", TEXT, "digest of the plan, the same on all members", required=False),
        ),
    ),
    names.ITERATION: EventSchema(
        "the reporting worker",
        "All workers have agreed on a step and it is done; `epoch` is the epoch in which it was agreed.",
        (
            *_ITERATION_FIELDS,
            Field("loss_scale", NUMBER, "what losses were multiplied by; null: it never changes", required=False),
            Field("samples", INTEGER, "samples of the iteration: the global batch size", required=False),
            Field(
                "duration_s",
                NUMBER,
                "seconds since this reporter's previous `iteration`; null: its first",
                required=False,
            ),
        ),
    ),
    names.AGREED: EventSchema(
        "coordinator",
        "The last agreed step when an epoch broke; stands in for an `iteration` whose reporter died. "
        "Of several for one iteration the first counts.",
        _ITERATION_FIELDS,
    ),
    names.SAMPLES: EventSchema(
        "one worker of a replica",
        "What a replica fed to the model in one attempt of an iteration; `epoch` is the attempt. "
        "The attempt counts as applied if the iteration was agreed in that epoch.",
        (
            Field("epoch", INTEGER, "the attempt"),
            Field("iteration", INTEGER, "the iteration that was attempted"),
            Field("samples", RANGES, "sample indices in the order fed, both ends included"),
            Field("replica", INTEGER, "index of the replica in the epoch's plan", required=False),
            Field(
                "micro_batches",
                INTEGERS,
                "the replica's micro-batches, as indices into the global batch",
                required=False,
            ),
        ),
    ),
    names.WORKER_STARTED: EventSchema(
        "each worker",
        "A worker knows its device, before it joins others.",
        (
            Field("host", TEXT, "name of its machine"),
            Field("node", INTEGER, "its node's rank"),
            Field("local_rank", INTEGER, "its place on the node"),
            Field("pid", INTEGER, "its process"),
            Field("gpu", INTEGER, "index of its GPU on the machine; null: none, or not known", required=False),
            Field("gpu_uuid", TEXT, "what `nvidia-smi -L` calls it", required=False),
            Field("gpu_name", TEXT, "its model", required=False),
        ),
    ),
    names.WORKER_DEAD: EventSchema(
        "coordinator",
        "A worker was given up for dead.",
        (
            Field("dead", INTEGER, "the worker"),
            Field("node", NAME, "its node", required=False),
            Field(
                "cause",
                TEXT,
                '"exit signal 9", "no heartbeat for 5.0 s", "connection lost", "fenced itself" (it was cut off and '
                'ended), "did not report within 60 s", "node lost: …"; of one not taken in yet also why it ended. '
                'Where that is known, first why: "fault injection, …", "out-of-memory killer, …", or its last words',
            ),
            Field("died_at", NUMBER, "best known time of death, in Unix seconds", required=False),
            Field("noticed_at", NUMBER, "when the coordinator knew", required=False),
        ),
    ),
    names.WORKER_FAILED: EventSchema(
        "coordinator",
        "A worker raised an error that is no communication failure.",
        (Field("failed", INTEGER, "the worker"), Field("error", TEXT, "its error")),
    ),
    names.PLAN_FAILED: EventSchema(
        "coordinator",
        "An error struck in the first step of a plan that was chosen. It is answered once: after a change by choice by "
        "the plan before, after a loss by complete uniform replicas. The plan is not chosen again.",
        (
            Field("failed", INTEGER, "the worker that raised it"),
            Field("error", TEXT, "the error"),
            Field("digest", TEXT, "digest of the plan"),
            Field("number", INTEGER, "of the change by choice; null: the plan came after a loss", required=False),
        ),
    ),
    names.WORKER_RESTARTED: EventSchema(
        "coordinator",
        "A worker that died has been started anew, with an id of its own.",
        (Field("restarted", INTEGER, "its id"), Field("instead_of", INTEGER, "the one that died")),
    ),
    names.WORKER_WAITING: EventSchema(
        "coordinator",
        "A worker that was not there at the start is ready, holds nothing and waits for a plan that has it in it.",
        (
            Field("waiting", INTEGER, "the worker"),
            Field("place", INTEGER, "its place: the id of who was there first, which may be itself"),
        ),
    ),
    names.EXPOSED: EventSchema(
        "coordinator",
        "Which single losses would end the job as it is placed at the start.",
        (
            Field("nodes", INTEGERS, "of these nodes, with node 0, whose coordinator ends with it"),
            Field("workers", INTEGERS, "of these workers, alone"),
            Field("said", TEXT, "in words, with what would mend it"),
        ),
    ),
    names.NODE_LEFT: EventSchema(
        "coordinator",
        "A node that was told to end has left; no plan has its workers any more.",
        (
            Field("node", INTEGER, "its rank"),
            Field("left", INTEGERS, "the workers that it had"),
        ),
    ),
    names.EPOCH_BROKEN: EventSchema(
        "coordinator",
        "An epoch was given up; its members stop and agree on the next.",
        (
            Field("cause", TEXT, "why"),
            Field("broken_epoch", INTEGER, "the epoch", required=False),
            Field("by", NAME, "worker that asked for it; null: the coordinator", required=False),
        ),
    ),
    names.PHASE: EventSchema(
        "each worker",
        "How long one part of a recovery took on one worker.",
        (
            Field("phase", TEXT, ", ".join(names.PHASES)),
            Field("seconds", NUMBER, "its duration"),
            Field("to_epoch", INTEGER, "the epoch that the recovery led to"),
        ),
    ),
    names.RECOVERY: EventSchema(
        "coordinator",
        "Training goes on under a new plan.",
        (
            Field("from_epoch", INTEGER, "the epoch that broke"),
            Field("to_epoch", INTEGER, "the epoch that goes on"),
            Field("resumed_iteration", INTEGER, "last applied step"),
            Field("dead", INTEGERS, "the workers that died; may repeat those of earlier recoveries"),
            Field("bytes_moved", INTEGER, "state that had to be sent between workers", required=False),
            Field("steps_redone", INTEGER, "1 if the iteration that broke is computed again, else 0", required=False),
            Field("broken_at", NUMBER, "when the epoch broke", required=False),
            Field("resumed_at", NUMBER, "when all workers went on", required=False),
        ),
    ),
    names.PLAN_CHANGE: EventSchema(
        "coordinator",
        "Another plan is to be taken by choice; workers leave the epoch after the same iteration. If a failure comes "
        "first, no `reconfiguration` follows.",
        (
            Field("number", INTEGER, "of the change, from 1"),
            Field("why", TEXT, "who asked for it, and why"),
            Field("from_digest", TEXT, "digest of the plan in force"),
            Field("to_digest", TEXT, "digest of the plan to come"),
            Field("changes", TEXTS, "what changes, line by line"),
        ),
    ),
    names.CHANGE_REFUSED: EventSchema(
        "coordinator",
        "A plan was asked for that can't be taken.",
        (Field("why", TEXT, "who asked for it, and why"), Field("reason", TEXT, "why not")),
    ),
    names.RECONFIGURATION: EventSchema(
        "coordinator",
        "Training goes on under a plan that was taken by choice.",
        (
            Field("number", INTEGER, "of the change"),
            Field("why", TEXT, "who asked for it, and why"),
            Field("from_epoch", INTEGER, "the epoch that was left"),
            Field("to_epoch", INTEGER, "the epoch that goes on"),
            Field("resumed_iteration", INTEGER, "last applied step"),
            Field("bytes_moved", INTEGER, "state that had to be sent between workers", required=False),
            Field("steps_redone", INTEGER, "0: nothing is computed again", required=False),
            Field("left_at", NUMBER, "when the first worker stopped", required=False),
            Field("resumed_at", NUMBER, "when all workers went on", required=False),
            Field("stood_still_s", NUMBER, "seconds between both"),
            Field("groups_made_ahead", FLAG, "whether all workers had made their groups before", required=False),
        ),
    ),
    names.CHANGE_MEASURED: EventSchema(
        "the policy, on node 0",
        "Whether a change by choice has paid; told where nobody became slow, well again or died in between.",
        (
            Field("number", INTEGER, "of the change"),
            Field("before_s", NUMBER, "median seconds of an iteration before it"),
            Field("after_s", NUMBER, "the same of 16 iterations after it"),
        ),
    ),
    names.MODEL: EventSchema(
        "coordinator",
        "What a worker has told of the model, for planning.",
        (Field("arguments", OBJECT, "Megatron's arguments by name, those that work and memory depend on"),),
    ),
    names.PLANNED: EventSchema(
        "coordinator",
        "Who planned for survivors, where the job has a strategy of its own.",
        (
            Field("strategy", TEXT, "whose plan is taken"),
            Field("instead_of", TEXT, "whose plan was wanted", required=False),
            Field("reason", TEXT, "why that was not taken", required=False),
            Field("overtaken", FLAG, "whether it came too late; it is taken later, if it pays", required=False),
            Field("planning_s", NUMBER, "how long it thought", required=False),
            Field("waited_s", NUMBER, "how long training stood still for that", required=False),
            Field("made_ahead", FLAG, "whether it had thought before the loss, and nobody waited", required=False),
            Field("iteration_s", NUMBER, "seconds of an iteration's pipelines, by simulation", required=False),
            Field("bound_s", NUMBER, "what no plan can beat", required=False),
            Field("moving_s", NUMBER, "how long getting there was thought to take", required=False),
        ),
    ),
    names.WOULD_CHANGE: EventSchema(
        "the policy, on node 0",
        "A change of plan by choice would pay, and the job was started to observe only.",
        (*_RECOMMENDED, Field("plan", PLAN, "the plan", required=False)),
    ),
    names.PROPOSAL: EventSchema(
        "the policy, on node 0",
        "A change of plan by choice would pay; `resihp apply RUN_DIR PATH` makes it.",
        (*_RECOMMENDED, Field("path", TEXT, "where the plan is")),
    ),
    names.NO_PLAN: EventSchema(
        "the policy, on node 0",
        "The planner was asked for another plan and has none; training goes on with the one in force.",
        (Field("reason", TEXT, "why"),),
    ),
    names.POLICY_FAILED: EventSchema(
        "the policy, on node 0",
        "The policy has given up: no more changes by choice unless by hand. Training and the rest go on.",
        (Field("error", TEXT, "why"),),
    ),
    names.FIRST_STEP: EventSchema(
        "each working worker, or one of them",
        "The first iteration after a recovery is complete; `time` is its end. The last of a recovery counts.",
        (
            Field("to_epoch", INTEGER, "the epoch that goes on"),
            Field("iteration", INTEGER, "the iteration"),
            Field("seconds_since_death", NUMBER, "from the first death to the end of the iteration", required=False),
            Field("redone_compute_s", NUMBER, "time spent on work that had been done before", required=False),
        ),
    ),
    names.DRILL: EventSchema(
        "the worker that is struck, or the coordinator",
        "A failure was injected on purpose.",
        (
            Field("action", TEXT, "kill, stop or rebuild"),
            Field("target", NAME, "the worker or node"),
            Field("iteration", INTEGER, "iteration at which it struck", required=False),
            Field("point", TEXT, "point of the iteration at which it struck", required=False),
        ),
    ),
    names.DRILL_SET: EventSchema(
        "coordinator",
        "A fault injection has slowed a worker or a link, or ended that.",
        (
            Field("workers", INTEGERS, "one worker, the two ends of a link, or none: all are at full speed again"),
            Field("factor", NUMBER, "speed or bandwidth relative to its own when healthy, in (0, 1]"),
            Field("iteration", INTEGER, "for when it was scheduled; null: asked for from outside", required=False),
            Field("speeds", NAMED_NUMBERS, "workers that are slowed now, with their speeds", required=False),
            Field("links", NAMED_NUMBERS, 'links that are slowed now, as "A-B", with their factors', required=False),
        ),
    ),
    names.DRILL_REFUSED: EventSchema(
        "coordinator",
        "A scheduled slowdown could not be set when its iteration began.",
        (
            Field("workers", INTEGERS, "the worker, or the two ends of a link"),
            Field("reason", TEXT, "why"),
        ),
    ),
    names.EMULATION: EventSchema(
        "each worker",
        "How well the emulated clock was kept, at the end of training.",
        (
            Field("ops", INTEGER, "forward and backward passes that were made to last as long as on the device"),
            Field("late", INTEGER, "of these, those that really took longer"),
        ),
    ),
    names.OPTIMIZER_COPY: EventSchema(
        "each worker that keeps one",
        "What keeping a copy of another worker's part of the distributed optimizer has cost, at the end of training.",
        (
            Field("owner", INTEGER, "whose part it is"),
            Field("steps", INTEGER, "that it has taken since the epoch began"),
            Field("bytes_kept", INTEGER, "of host memory: masters and moments"),
            Field("bytes_per_step", INTEGER, "gradients that this worker sent to the copy of its own part"),
            Field("exchange_s", NUMBER, "seconds per step until both gradients had passed, waits for others included"),
            Field("step_s", NUMBER, "seconds per step to take the owner's step, in the background"),
        ),
    ),
    names.EVALUATION: EventSchema(
        "the reporting worker",
        "An evaluation on held-out data.",
        (
            Field("iteration", INTEGER, "last step before it"),
            Field("loss", NAMED_NUMBERS, "loss by name"),
        ),
    ),
    names.RESOURCES: EventSchema(
        "each worker",
        "What it holds after a recovery or change of plan: a leak would show here.",
        (
            Field("to_epoch", INTEGER, "epoch that holds"),
            Field("threads", INTEGER, "threads of the process"),
            Field("descriptors", INTEGER, "its open file descriptors"),
            Field("groups", INTEGER, "torch's process groups"),
            Field("resident_bytes", INTEGER, "memory of the process on the host"),
            Field("left_behind", INTEGER, "groups of earlier epochs that could not be ended yet"),
            Field("bytes_before", INTEGER, "of parameters, gradients and optimizer before a rebuild", required=False),
            Field("bytes_new", INTEGER, "of the new ones, what was not taken over from the old", required=False),
            Field("bytes_most", INTEGER, "old ones, without gradients, and new ones together", required=False),
        ),
    ),
    names.DIGEST: EventSchema(
        "each worker",
        "Digests of the state that it holds at the end, with `--resihp-record-digests`.",
        (
            Field("iteration", INTEGER, "last step"),
            Field("digests", OBJECT, "digest by shard or slice, the same on all who hold it"),
        ),
    ),
    names.CHECKPOINT: EventSchema(
        "the reporting worker",
        "A checkpoint was written.",
        (
            Field("iteration", INTEGER, "last step in it"),
            Field("path", TEXT, "where it is"),
            Field("seconds", NUMBER, "how long training waited for it", required=False),
            Field("format", TEXT, "Megatron's name of its format", required=False),
        ),
    ),
    names.SALVAGE: EventSchema(
        "each survivor that wrote, or the coordinator",
        "No plan was left: the survivors wrote what they hold.",
        (
            Field("iteration", INTEGER, "last applied step"),
            Field("path", TEXT, "where it is"),
            Field("complete", FLAG, "whether all state is there"),
            Field("missing", PAIRS, "[stage, tp_rank] of each shard that nobody holds", required=False),
        ),
    ),
    names.STALL: EventSchema(
        "the launcher on node 0",
        "No iteration was finished for three times as long as one usually takes. Told again while that lasts, and at "
        "its end.",
        (
            Field("iteration", INTEGER, "last step before it"),
            Field("seconds", NUMBER, "since that step"),
            Field("usual_s", NUMBER, "what an iteration usually takes"),
            Field("over", FLAG, "whether an iteration was finished now"),
            Field(
                "meanwhile",
                TEXT,
                "what goes on or is due then: recovery, change of plan, evaluation, checkpoint",
                required=False,
            ),
        ),
    ),
    names.VERDICT: EventSchema(
        "the detector, on node 0",
        "A worker or a link became slow, changed its speed while slow, or is healthy again.",
        (
            Field("kind", TEXT, "compute or link"),
            Field("change", TEXT, "onset, severity or recovery"),
            Field("workers", INTEGERS, "the worker, or the two ends of the link"),
            Field("speed", NUMBER, "p in (0, 1], relative to its own healthy speed"),
            Field("speed_low", NUMBER, "lower end of the 95 % confidence interval of p", required=False),
            Field("speed_high", NUMBER, "its upper end", required=False),
            Field("since", INTEGER, "estimated first iteration of the change"),
            Field("iteration", INTEGER, "iteration whose records decided"),
            Field("evidence", NAMED_NUMBERS, "what it rests on, by name", required=False),
        ),
    ),
    names.SUSPICION: EventSchema(
        "the detector, on node 0",
        "One of several workers is slow and the evidence does not say which: they are validated. Written again if that "
        "named nobody; then they are validated again later.",
        (
            Field("workers", INTEGERS, "the suspects"),
            Field("speed", NUMBER, "p of whoever it is"),
            Field("since", INTEGER, "estimated first iteration"),
            Field("iteration", INTEGER, "when"),
            Field("tested", FLAG, "whether validation is over, and named nobody"),
        ),
    ),
    names.VALIDATION: EventSchema(
        "each worker that took part",
        "Micro-benchmarks between two iterations, because the evidence left several suspects.",
        (
            Field("number", INTEGER, "of the validation"),
            Field("iteration", INTEGER, "after which it ran"),
            Field("seconds", NUMBER, "what it cost this worker"),
            Field("gemm_seconds", NUMBERS, "each repeat of a matrix product; empty: not a suspect"),
            Field(
                "transfers",
                LIST,
                'P2P with each peer: `[{"peer", "size" in bytes, "seconds": each repeat}]`',
                required=False,
            ),
        ),
    ),
    names.NOTICE: EventSchema(
        "the detector, on node 0",
        "Something took time that is no device's doing, such as a stalled data loader. Told once it has cost a second "
        "in all, each time that has grown tenfold, and when a single one is twice as long as all before it.",
        (
            Field("what", TEXT, "data, garbage_collection, evaluation, save, ..."),
            Field("workers", INTEGERS, "the workers that it has held up since it was told last"),
            Field("seconds", NUMBER, "the longest of their waits in this iteration"),
            Field("iteration", INTEGER, "when"),
            Field("times", INTEGER, "how many iterations it has held up so far", required=False),
            Field("total_s", NUMBER, "what these have cost", required=False),
            Field("longest_s", NUMBER, "what the longest of them has", required=False),
        ),
    ),
    names.DETECTION_RESUMED: EventSchema(
        "the detector, on node 0",
        "The detector was given what an earlier run has learned.",
        (
            Field("path", TEXT, "the file"),
            Field("fits", FLAG, "whether it fits this job; if not, warm-up is as usual"),
            Field("iteration", INTEGER, "when that was known; if it fits, later ones are judged"),
        ),
    ),
    names.DETECTION: EventSchema(
        "the detector, on node 0",
        "What the detector has seen of the run; written at its end.",
        (
            Field("iterations", INTEGER, "iterations that were judged"),
            Field("records", INTEGER, "records of workers that arrived"),
            Field(
                "faults", NAMED_NUMBERS, "what was dropped or left out, and how often; see `detector.input.counters`"
            ),
            Field("warm", FLAG, "whether there were iterations enough to learn what is normal"),
            Field("held_up_s", NAMED_NUMBERS, "seconds that each kind of `notice` has cost in all", required=False),
        ),
    ),
    names.DETECTION_FAILED: EventSchema(
        "the detector, on node 0",
        "A part of the detector has given up; training and the rest go on.",
        (Field("part", TEXT, "verdicts, recording or cost model"), Field("error", TEXT, "why")),
    ),
    names.LINK_FAILED: EventSchema(
        "coordinator",
        "Workers of two nodes could not reach each other twice in a row while all lived; one side is left out.",
        (
            Field("reason", TEXT, "who can't reach whom"),
            Field("left_out", INTEGERS, "the workers that the job goes on without"),
        ),
    ),
    names.MESSAGE_DROPPED: EventSchema(
        "coordinator",
        "A message to the coordinator was malformed and had no effect. After the tenth no more are told.",
        (
            Field("reason", TEXT, "what is wrong with it"),
            Field("text", TEXT, "how it begins"),
        ),
    ),
    names.LOG_GAP: EventSchema(
        "the launcher on node 0",
        "The log could not be written for a while, on a full disk perhaps, and lacks what happened then.",
        (
            Field("events", INTEGER, "how many events are missing"),
            Field("since", NUMBER, "when the first of them could not be written, in Unix seconds"),
        ),
    ),
    names.RUN_FINISHED: EventSchema(
        "coordinator",
        "The run is over.",
        (
            Field("exit_code", INTEGER, "exit code of the launcher; 0: all went well"),
            Field("reason", TEXT, "why it ended", required=False),
        ),
    ),
}


def problems(event: Mapping[str, Any]) -> list[str]:
    """What keeps a reader from using `event`; an event of a name unknown here has none."""
    name = event.get("event")
    schema = EVENTS.get(name) if isinstance(name, str) else None
    found = [_problem(field, event) for field in COMMON + (schema.fields if schema else ())]
    return [f"{name} {problem}" for problem in found if problem]


def _problem(field: Field, event: Mapping[str, Any]) -> str | None:
    value = event.get(field.name)
    if value is None:
        return f"lacks {field.name}" if field.required else None
    return None if field.kind.accepts(value) else f"has a {field.name} that is no {field.kind.label}"


def markdown() -> str:
    """docs/events.md."""
    parts = [_INTRODUCTION, _table(COMMON)]
    for name, schema in EVENTS.items():
        text = textwrap.fill(f"{schema.meaning} Written by: {schema.written_by}.", 120)
        parts += [f"## {name}\n\n{text}\n", _table(schema.fields)]
    return "\n".join(parts)


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{f.name}` | {f.kind.label} | {'yes' if f.required else 'no'} | {f.meaning} |" for f in fields]
    return "\n".join(["| field | type | required | meaning |", "| --- | --- | --- | --- |", *rows, ""])


_INTRODUCTION: Final = f"""\
# Events

<!-- Written by `python -m megatron_resihp.events.schema`; edit megatron_resihp/events/schema.py instead. -->

A run's event log is `RUN_DIR/{names.FILE_NAME}`: one JSON object a line, appended as things happen. It is all that
`resihp report` reads. A line that was cut off or damaged is skipped and reported, and so is an event that lacks a
required field; an event of a name that is not listed here is skipped. Fields that are not required may be null or
missing. Numbers that JSON cannot spell are the strings `"nan"`, `"inf"` and `"-inf"`.

Every event has:
"""


if __name__ == "__main__":
    print(markdown(), end="")
