# SPDX-License-Identifier: Apache-2.0
"""What is told of the job as a whole: what it is, when it stands still, and how it ends.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from megatron_resihp.events.event import Event, event


@event("run_started", written_by="coordinator")
class RunStarted(Event):
    """The launcher has started. A log that holds several runs is read from the last of these."""

    world_size: Annotated[int, "workers at the start"]
    nnodes: Annotated[int | None, "nodes at the start"] = None
    most_nodes: Annotated[int | None, "those and the nodes that may join later"] = None
    nproc_per_node: Annotated[int | None, "workers per node"] = None
    command: Annotated[tuple[str, ...] | None, "the command line of a worker"] = None


@event("job", written_by="a worker")
class Job(Event):
    """Megatron's arguments are known. The first of a run counts."""

    tensor_parallel: Annotated[int | None, "tensor-parallel degree at the start"] = None
    pipeline_parallel: Annotated[int | None, "pipeline stages at the start"] = None
    context_parallel: Annotated[int | None, "replicas that share each sequence at the start"] = None
    expert_parallel: Annotated[int | None, "replicas that share each layer's experts at the start"] = None
    expert_members: Annotated[
        int | None, "members of a stage that have a cut each of the same experts; 0: all have"
    ] = None
    sharings: Annotated[
        tuple[tuple[int, int, int], ...] | None,
        "`[context, experts, members]`: how many replicas may share each sequence and each layer's experts, and how "
        "many members of a stage have the same experts (0: all), the job's own first",
    ] = None
    uneven_sharings: Annotated[
        tuple[tuple[int, int], ...] | None,
        "`[replicas, experts]`: how many replicas may share each layer's experts in unequal numbers, and how many "
        "experts a layer has",
    ] = None
    equal_rounds: Annotated[bool | None, "replicas that share experts must have equally many micro-batches"] = None
    chunks: Annotated[
        tuple[tuple[int, int, int], ...] | None, "`[stage, first, end]`: the layers of each stage at the start"
    ] = None
    pipeline_last: Annotated[bool | None, "Megatron's default order of ranks, not --use-tp-pp-dp-mapping"] = None
    spread_replicas: Annotated[bool | None, "no shard is to live on one node only, --resihp-spread-replicas"] = None
    tied: Annotated[bool | None, "the head has the word embeddings, too"] = None
    micro_batch_size: Annotated[int | None, "samples in a micro-batch"] = None
    global_batch_size: Annotated[int | None, "samples in an iteration"] = None
    micro_batches: Annotated[int | None, "micro-batches in an iteration, over all replicas"] = None
    batch_steps: Annotated[
        tuple[tuple[int, int], ...] | None,
        "`[first sample, samples]`: sizes of batches that grow; null or empty: they don't",
    ] = None
    micro_batch_group: Annotated[
        int | None, "micro-batches in a group of an interleaved pipeline; null: it is not interleaved"
    ] = None
    seq_length: Annotated[int | None, "tokens in a sample"] = None
    sequence_parallel: Annotated[bool | None, "members of a stage share the tokens between layers"] = None
    train_iters: Annotated[int | None, "iterations to reach; null: not known"] = None
    ends_early: Annotated[bool | None, "the job may end before, with --exit-interval or --exit-duration-in-mins"] = None
    eval_interval: Annotated[int | None, "iterations from one evaluation to the next; null: none"] = None
    save_interval: Annotated[int | None, "iterations from one checkpoint to the next; null: none"] = None
    non_persistent_save_interval: Annotated[int | None, "likewise of checkpoints that the next ones replace"] = None
    distributed_optimizer: Annotated[bool | None, "replicas share the optimizer's state out"] = None
    strategy: Annotated[str | None, "strategy that plans when workers die"] = None
    plan_wait: Annotated[float | None, "how long a recovery waits for that, in seconds"] = None
    act: Annotated[str | None, "what is done when another plan is faster: observe, ask or act"] = None
    begins_with_a_plan: Annotated[bool | None, "another plan is asked for as the job begins"] = None
    seconds_between_changes: Annotated[float | None, "least time between voluntary changes"] = None
    device_memory: Annotated[int | None, "bytes of each device; null: not known"] = None
    memory_reserve: Annotated[float | None, "percent of that which plans leave free"] = None
    host_memory: Annotated[
        int | None, "bytes of host memory that a worker's state may take in a change of plan; null: not known"
    ] = None
    gemm: Annotated[tuple[int, ...] | None, "m, n and k of a matrix product of the training"] = None
    false_alarms_per_job: Annotated[float | None, "what the detector may get wrong, on average"] = None
    cost_model: Annotated[str | None, "file that the detector was to start from; null: none named"] = None
    carrier: Annotated[
        str | None, "what carries gradients and results under a plan whose replicas differ: host or device"
    ] = None
    emulated: Annotated[str | None, "device profile of the emulated clock; null: none"] = None


@event("batch_grown", written_by="coordinator")
class BatchGrown(Event):
    """From the next iteration on, batches are larger: --step-batch-size-schedule."""

    global_batch_size: Annotated[int, "samples in an iteration"]
    micro_batches: Annotated[int, "micro-batches in an iteration, over all replicas"]


@event("coordinator_replaced", written_by="coordinator")
class CoordinatorReplaced(Event):
    """Another coordinator has taken the place of one that was lost."""

    by: Annotated[str, "its process and machine"]


@event("model", written_by="coordinator")
class Model(Event):
    """What a worker has told of the model, for planning."""

    arguments: Annotated[Mapping[str, Any], "Megatron's arguments by name, those that work and memory depend on"]


@event("exposed", written_by="coordinator")
class Exposed(Event):
    """Which single losses would end the job as it is placed at the start."""

    nodes: Annotated[tuple[int, ...], "of these nodes, with node 0 if its loss is that of the coordinator"]
    workers: Annotated[tuple[int, ...], "of these workers, alone"]
    said: Annotated[str, "in words, with what would avoid it"]


@event("stall", written_by="the launcher on node 0")
class Stall(Event):
    """No iteration was finished for three times as long as one usually takes. Told again while that lasts, and at its
    end."""

    iteration: Annotated[int, "last step before it"]
    seconds: Annotated[float, "since that step"]
    usual_s: Annotated[float, "what an iteration usually takes"]
    over: Annotated[bool, "whether an iteration was finished now"]
    meanwhile: Annotated[
        str | None, "what goes on or is due then: recovery, change of plan, evaluation, checkpoint"
    ] = None


@event("message_dropped", written_by="coordinator")
class MessageDropped(Event):
    """A message to the coordinator was malformed and had no effect. After the tenth no more are told."""

    reason: Annotated[str, "what is wrong with it"]
    text: Annotated[str, "how it begins"]


@event("log_gap", written_by="the launcher on node 0")
class LogGap(Event):
    """The log could not be written for a while, on a full disk perhaps, and lacks what happened then."""

    events: Annotated[int, "how many events are missing"]
    since: Annotated[float, "when the first of them could not be written, in Unix seconds"]


@event("log_failed", written_by="the launcher on node 0")
class LogFailed(Event):
    """TensorBoard files or W&B could not be written; training goes on. It is told again only if it
    has worked in between."""

    part: Annotated[str, "TensorBoard or W&B"]
    error: Annotated[str, "why"]


@event("run_finished", written_by="coordinator")
class RunFinished(Event):
    """The run is over."""

    exit_code: Annotated[int, "exit code of the launcher; 0: all went well"]
    reason: Annotated[str | None, "why it ended"] = None
