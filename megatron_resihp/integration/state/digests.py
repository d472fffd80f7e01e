# SPDX-License-Identifier: Apache-2.0
"""Digests of the state that this worker holds, under keys on which its other holders must agree.

Keys are those of `control.coordination.digests`. May import torch and this package.
"""

import torch

from megatron_resihp.events.training import Digest
from megatron_resihp.executor.digest import digest_tensors
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.extra_state import extra_digests
from megatron_resihp.integration.state.shard import shard_tensors
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Coordinate


def shard_digest(trained: Trained, coordinate: Coordinate | None) -> dict[str, str]:
    """The digest of the shard of the job's own layout that these objects hold; empty if they hold nothing."""
    if coordinate is None:
        return {}
    device = torch.device("cuda", torch.cuda.current_device())
    return {f"{coordinate.stage}/{coordinate.tp_rank}": digest_tensors(shard_tensors(trained), device)}


def record_digests(runtime: Runtime) -> None:
    """Write them to the event log, if that is asked for."""
    if runtime.job.config.resihp_record_digests and runtime.held.is_built:
        digests = runtime.mode.state.digests(runtime.held.live) | extra_digests(runtime.held.extra.current)
        runtime.control.event(Digest(iteration=runtime.progress.iteration, digests=digests))
