# SPDX-License-Identifier: Apache-2.0
"""Groups of replicas that share sequences, where these groups differ in size.

Megatron's own are of one size. So it makes its groups for replicas that share nothing, whose sums over replicas are the
same, and those in which a sequence is shared are put in place of its own. May import megatron and this package.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron_resihp.integration.world.group_needs import timeout_of
from megatron_resihp.integration.world.view import UniformView
from megatron_resihp.plan.parallel_plan import shared_with


def context_ranks(view: UniformView) -> tuple[list[int], ...]:
    """The ranks in a working worker's groups: of those with its place in the replicas that share its sequences, and of
    all members of its stage in these. Nothing where Megatron's own groups do."""
    plan, coordinate = view.plan, view.plan.coordinate_of(view.worker)
    if not (plan.context_groups and view.works):
        return ()
    assert coordinate is not None
    rank_of = {worker: rank for rank, worker in enumerate(view.rank_order)}
    stages = [plan.replicas[number].stages[coordinate.stage] for number in shared_with(plan, view.replica)]
    alike = [rank_of[members[coordinate.tp_rank]] for members in stages]
    return sorted(alike), sorted(rank_of[worker] for members in stages for worker in members)


def make_context_groups(view: UniformView, args: Namespace) -> None:
    """Make them and tell Megatron of them, if the plan has such; its own groups have been made."""
    ranks = context_ranks(view)
    if not ranks:
        return
    settings = _settings_of_nccl(args.nccl_communicator_config_path)
    # Each worker makes as many: torch names a group by how many its member has made before.
    alike, in_stage = (
        parallel_state.create_group(
            each, timeout=timeout_of(args), pg_options=parallel_state.get_nccl_options(name, settings),
            use_local_synchronization=True, group_desc=name,
        )
        for name, each in zip(("cp", "tp_cp"), ranks, strict=True)
    )  # fmt: skip
    names = ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    for name, value in zip(names, (alike, ranks[0], in_stage), strict=True):
        if not hasattr(parallel_state, name):
            raise AttributeError(f"this Megatron has no {name}")
        setattr(parallel_state, name, value)


def _settings_of_nccl(path: str | None) -> dict[str, Any]:
    """Settings of groups, by their names."""
    if path is None:
        return {}
    import yaml  # which Megatron, too, needs for this only

    found: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    return found
