# SPDX-License-Identifier: Apache-2.0
"""What training did: steps, samples, and what was saved.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from megatron_resihp.events.event import Event, event
from megatron_resihp.events.fields import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedStep(Event):
    """A step that all workers have agreed on."""

    iteration: Annotated[int, "number of the completed step, from 1"]
    loss: Annotated[Mapping[str, float] | None, "loss by name, averaged over the global batch"] = None
    grad_norm: Annotated[float | None, "norm of the whole gradient"] = None
    skipped: Annotated[bool | None, "the step was skipped: a gradient had overflowed in half precision"] = None
    agreed_epoch: Annotated[int | None, "the epoch whose attempt was agreed; without it, `epoch` is"] = None


@event("iteration", written_by="the reporting worker")
class Iteration(AgreedStep):
    """All workers have agreed on a step and it is done; `epoch` is the epoch in which it was agreed."""

    loss_scale: Annotated[float | None, "what losses were multiplied by; null: it never changes"] = None
    samples: Annotated[int | None, "samples of the iteration: the global batch size"] = None
    duration_s: Annotated[float | None, "seconds since this reporter's previous `iteration`; null: its first"] = None
    ends: Annotated[bool | None, "the job was asked to end after it, or its time is up"] = None


@event("agreed", written_by="coordinator")
class Agreed(AgreedStep):
    """The last agreed step when an epoch broke; stands in for an `iteration` whose reporter died. Of several for one
    iteration the first counts."""


@event("samples", written_by="one worker of a replica")
class Samples(Event):
    """What a replica fed to the model in one attempt of an iteration; `epoch` is the attempt. The attempt counts as
    applied if the iteration was agreed in that epoch."""

    epoch: Annotated[int, "the attempt"]
    iteration: Annotated[int, "the iteration that was attempted"]
    samples: Annotated[Ranges, "sample indices in the order fed, both ends included"]
    replica: Annotated[int | None, "index of the replica in the epoch's plan"] = None
    micro_batches: Annotated[
        tuple[int, ...] | None, "the replica's micro-batches, as indices into the global batch"
    ] = None
    consumed: Annotated[int | None, "samples of the data set that all earlier iterations have consumed"] = None


@event("checkpoint", written_by="the reporting worker")
class Checkpoint(Event):
    """A checkpoint was written."""

    iteration: Annotated[int, "last step in it"]
    path: Annotated[str, "where it is"]
    seconds: Annotated[float | None, "how long training waited for it"] = None
    format: Annotated[str | None, "Megatron's name of its format"] = None


@event("salvage", written_by="each survivor that wrote, or the coordinator")
class EmergencyCheckpoint(Event):
    """No plan was left: the survivors wrote what they hold."""

    iteration: Annotated[int, "last applied step"]
    path: Annotated[str, "where it is"]
    complete: Annotated[bool, "whether all state is there"]
    missing: Annotated[tuple[tuple[int, int], ...] | None, "[stage, tp_rank] of each shard that no worker holds"] = None


@event("digest", written_by="each worker")
class Digest(Event):
    """Digests of the state that it holds at the end, with `--resihp-record-digests`."""

    iteration: Annotated[int, "last step"]
    digests: Annotated[Mapping[str, Any], "digest by shard or slice, the same on all holders"]


@event("optimizer_copy", written_by="each worker that keeps one")
class OptimizerCopy(Event):
    """What keeping a copy of another worker's part of the distributed optimizer, or of its experts, has cost, at the
    end of training."""

    owner: Annotated[int, "whose it is"]
    steps: Annotated[int, "that it has taken since the epoch began"]
    bytes_kept: Annotated[int, "of host memory: masters, or parameters where there are none, and moments"]
    bytes_per_step: Annotated[int, "gradients that this worker sent to the copy of its own"]
    exchange_s: Annotated[float, "seconds per step until both gradients had passed, waits for others included"]
    step_s: Annotated[float, "seconds per step to take the owner's step, in the background"]


@event("expert_loads", written_by="a worker")
class ExpertLoads(Event):
    """How unevenly experts were used in an iteration. Told when it has changed."""

    iteration: Annotated[int, "in which tokens were counted"]
    busiest_shares: Annotated[
        tuple[float, ...],
        "tokens of the busiest of 1, 2, … workers that share each layer's experts, over their mean; on average over "
        "layers",
    ]


@event("emulation", written_by="each worker")
class Emulation(Event):
    """How well the emulated clock was kept, at the end of training."""

    ops: Annotated[int, "forward and backward passes that were made to last as long as on the device"]
    late: Annotated[int, "of these, those that really took longer"]
