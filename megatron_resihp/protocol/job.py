# SPDX-License-Identifier: Apache-2.0
"""What the coordinator must know of a job: what a worker reads from Megatron's arguments and ours when it starts.

May import `coding`, `config` and this package's types of fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_resihp.coding import Between
from megatron_resihp.config import ACTS, FALSE_ALARMS_PER_JOB, HOST, MEMORY_RESERVE, PLAN_WAIT_S, UNIFORM
from megatron_resihp.protocol.values import (
    MOST_LAYERS,
    MOST_MICRO_BATCHES,
    Degree,
    Finite,
    LayerChunk,
    Natural,
    Positive,
    Seconds,
)


@dataclass(frozen=True)
class JobDescription:
    """One job; all of its workers say the same of its sizes.

    Attributes:
        tensor_parallel, pipeline_parallel, context_parallel, expert_parallel: degrees.
        micro_batches: in a global batch.
        chunks: the job's own split into layers.
        seq_length: tokens.
        sequence_parallel: members of a stage share the tokens between layers.
        keeps_degree: why all stages need the job's own tensor-parallel degree; empty: they don't.
        keeps_context: why as many replicas must share each sequence as in the job's own layout; empty: they needn't.
        keeps_experts: why as many replicas must share each layer's experts as in the job's own layout, and the same
            micro-batches must meet in them; empty: they needn't.
        equal_rounds: why replicas that share experts must have equally many micro-batches; empty: they needn't.
        even_experts: why replicas that share experts must have equal numbers of them; empty: they needn't.
        powers_of_two: why numbers of replicas that share experts must be powers of two; empty: they needn't.
        experts: of a layer that has any; 0: none has.
        expert_members: see `ParallelPlan`.
        expert_copies: experts that are held once have a copy with another worker.
        micro_batch_group: micro-batches that go through one chunk of an interleaved pipeline before its stages turn to
            the next chunk; None: it isn't interleaved.
        pipeline_last: Megatron's default order of ranks, not --use-tp-pp-dp-mapping.
        spread_replicas: no shard is to live on one node only.
        saves: checkpoints; so it saves as it ends in order.
        train_iters: the last iteration; None: unknown.
        ends_early: --exit-interval may end it before.
        eval_interval, save_interval, non_persistent_save_interval: iterations; None: it doesn't. The last one is of
            checkpoints that are not persistent.
        tied: the head has the word embeddings, too.
        micro_batch_size, global_batch_size: samples; of the first batch, if they grow.
        batch_steps: see `plan.batch_steps`.
        emulated: name of the emulated device; None: the clock is real.
        gemm: (m, n, k) of a matrix product of the training.
        false_alarms_per_job: how many false reports of slow workers are accepted.
        distributed_optimizer: replicas share the optimizer's state out.
        strategy: which plans in place.
        plan_wait: seconds that a recovery waits for its plan.
        act: what follows where another plan would be faster, one of config.ACTS.
        begins_with_a_plan: a change of plan is asked for at the first iteration.
        seconds_between_changes: by choice, at least.
        device_memory: bytes; None: unknown.
        memory_reserve: percent of it that plans leave free.
        cost_model: path of a fitted one.
        carrier: what carries gradients and results under a heterogeneous plan, one of config.CARRIERS.
        host_memory: bytes that each worker may take of the host's for its state; None: unknown.
    """

    tensor_parallel: Degree
    pipeline_parallel: Annotated[int, Between(1, MOST_LAYERS)]
    micro_batches: Annotated[int, Between(1, MOST_MICRO_BATCHES)]
    chunks: tuple[LayerChunk, ...]
    seq_length: Positive
    sequence_parallel: bool
    pipeline_last: bool
    micro_batch_group: Positive | None = None
    train_iters: Natural | None = None
    ends_early: bool = False
    eval_interval: Natural | None = None
    save_interval: Natural | None = None
    non_persistent_save_interval: Natural | None = None
    tied: bool = False
    micro_batch_size: Positive | None = None
    global_batch_size: Positive | None = None
    emulated: str | None = None
    gemm: tuple[Natural, Natural, Natural] | None = None
    false_alarms_per_job: float = FALSE_ALARMS_PER_JOB
    distributed_optimizer: bool = False
    strategy: str = UNIFORM
    plan_wait: Seconds = PLAN_WAIT_S
    act: str = ACTS[0]
    begins_with_a_plan: bool = False
    seconds_between_changes: float = 60.0
    device_memory: Natural | None = None
    memory_reserve: Finite = MEMORY_RESERVE
    cost_model: str | None = None
    carrier: str = HOST
    host_memory: Natural | None = None
    spread_replicas: bool = False
    saves: bool = False
    context_parallel: Degree = 1
    keeps_degree: str = ""
    keeps_context: str = ""
    keeps_experts: str = ""
    equal_rounds: str = ""
    even_experts: str = ""
    powers_of_two: str = ""
    expert_parallel: Degree = 1
    experts: Natural = 0
    expert_members: Natural = 0
    expert_copies: bool = False
    batch_steps: tuple[tuple[Natural, Positive], ...] = ()
