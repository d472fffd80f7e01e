# SPDX-License-Identifier: Apache-2.0
"""What one worker knows for the whole job. Imports torch, `config` and modules of this package that know no
runtime.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_resihp.config import ResihpConfig
from megatron_resihp.cost.training import distributes_optimizer
from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.support.batches import batch_steps
from megatron_resihp.integration.world.own_layers import OwnLayout, own_layout
from megatron_resihp.plan.batch_steps import Steps


@dataclass(frozen=True)
class Job:
    """What was given to the job at its start.

    Attributes:
        config: our flags.
        args: Megatron's arguments. Their sizes are those of the plan in force (`world.heterogeneous_groups.Sizes`).
        derived: what Megatron derives from them for other tensor-parallel degrees.
        own: the layout that they gave the job.
        shares_optimizer: whether the job uses a distributed optimizer where it can.
        optimizer_instances: in how many parts its replicas are divided, each of which has all of the optimizer's state.
        run: what tells this run from others in the same run directory.
        minutes: after which the job ends in order; None: it may take as long as it takes.
        batch_steps: sizes of its global batches; empty: they have one size.
    """

    config: ResihpConfig
    args: Any
    derived: DerivedArguments
    own: OwnLayout
    shares_optimizer: bool
    optimizer_instances: int
    run: str
    minutes: float | None
    batch_steps: Steps = ()

    @property
    def copies_experts(self) -> bool:
        """Whether experts that are held once are to have a copy with another worker, beside what parts of a distributed
        optimizer have anyway."""
        return self.config.resihp_expert_copies > 0 and self.own.expert_parallel > 1 and not self.shares_optimizer

    @property
    def counts_masters(self) -> int:
        """How often Megatron counts each master in the norm of parameters, in the job's own layout: it sums parts of
        masters over all replicas, and each instance of the optimizer has all parts. 0: it takes the parameters, not
        the masters, but in bf16."""
        if not self.args.bf16:
            return 0
        return self.optimizer_instances if self.shares_optimizer else 1


def job_of(config: ResihpConfig, args: Any, derived: DerivedArguments, run: str) -> Job:
    """Taken down before any plan changes what the validated arguments say."""
    minutes = args.exit_duration_in_mins or None
    # Megatron would ask all workers in each iteration; here the step's agreement carries the answer.
    args.exit_duration_in_mins = None
    steps = batch_steps(vars(args))
    return Job(
        config, args, derived, own_layout(args), distributes_optimizer(vars(args)),
        args.num_distributed_optimizer_instances, run, minutes, steps if len(steps) > 1 else (),
    )  # fmt: skip


def type_between_layers(args: Any) -> torch.dtype:
    """Of the numbers that cross between layers, as Megatron's validated arguments say it."""
    given: torch.dtype = args.params_dtype
    return torch.float32 if args.fp32_residual_connection else given
