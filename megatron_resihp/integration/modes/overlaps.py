# SPDX-License-Identifier: Apache-2.0
"""Which overlaps that a job asks for it does not have under some plans, or under any. Imports the support table only.

Modes tell of the former as a plan begins, the first worker of the others as the job begins, and `resihp check` of all
before it is queued.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from megatron_resihp.integration.support.table import GIVEN_UP

UNLIKE_REPLICAS: Final[Mapping[str, str]] = {
    "overlap_grad_reduce": "gradients of parameters that every tensor-parallel rank has whole (such as norms) are "
    "summed after the backward pass; with --resihp-carrier device, all gradients are",
    "overlap_param_gather": "no parameters are gathered",
    "overlap_param_gather_with_optimizer_step": "no parameters are gathered",
    "defer_embedding_wgrad_compute": "the head's weight gradients are computed in its backward pass",
}
"""Arguments of Megatron that ask for an overlap, and what happens in its place while replicas differ."""
ALL_EXPERTS: Final[Mapping[str, str]] = {"overlap_moe_expert_parallel_comm": "there is nothing to overlap"}
"""The same while each worker has all experts."""
WITH_ALL_EXPERTS: Final = {**{name: False for name in ALL_EXPERTS}, "ep_overlap_early_attn_memory_release": False}
"""What Megatron is told then: it refuses to overlap no communication."""


def flag_of(name: str) -> str:
    """How an argument of these is spelled."""
    return f"--{name.replace('_', '-')}"


def lost_always(asked: Mapping[str, Any]) -> Iterator[str]:
    """A line for each overlap that a job asks for and never has."""
    return (f"{flag_of(name)}: under every plan: {why}" for name, why in GIVEN_UP.items() if asked.get(name))


def lost_sometimes(asked: Mapping[str, Any]) -> Iterator[str]:
    """A line for each overlap that a job asks for and does not have under every plan."""
    for when, lost in (("replicas differ in shape", UNLIKE_REPLICAS), ("each worker has all experts", ALL_EXPERTS)):
        yield from (f"{flag_of(name)}: while {when}, {instead}" for name, instead in lost.items() if asked.get(name))
