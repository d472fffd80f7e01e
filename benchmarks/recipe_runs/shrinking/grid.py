# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes and layers: at most 8 workers, at least 2 replicas, and layers that the pipeline can be cut into.

Imports the standard library only.
"""

import re
from typing import Final

from recipe_runs.shrinking.draft import Draft

MOST_WORKERS: Final = 8
REPLICAS: Final = 2
"""A death loses no state only where another replica has it."""
MOST_CHUNKS: Final = 2
"""Of a pipeline rank."""
LAYERS: Final = 4

TENSOR, PIPELINE, CONTEXT = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EXPERT, EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
LAYER_COUNT, LAYOUT = "--num-layers", "--pipeline-model-parallel-layout"
PER_VIRTUAL_STAGE, VIRTUAL_STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
INSTANCES = "--num-distributed-optimizer-instances"


def shrink_grid(draft: Draft) -> None:
    chunks = _chunks(draft)
    _shrink_degrees(draft)
    _shrink_layers(draft, min(chunks, MOST_CHUNKS))


def _shrink_degrees(draft: Draft) -> None:
    degrees = {flag: draft.number(flag) for flag in (PIPELINE, TENSOR, CONTEXT)}
    keep_pipeline = draft.has(FIRST) or (draft.has("--num-experts") and _chunks(draft) > 1)
    tensor = draft.number(TENSOR)

    def size() -> int:
        return degrees[TENSOR] * degrees[PIPELINE] * degrees[CONTEXT]

    sharers = _sharers(draft)
    while size() * REPLICAS * sharers > MOST_WORKERS:
        # The pipeline first where two are equal, and it last where its ends have layers of their own.
        order = sorted(degrees, key=lambda flag: (keep_pipeline and flag == PIPELINE, -degrees[flag]))
        degrees[next(flag for flag in order if degrees[flag] > 1)] //= 2
    for flag, degree in degrees.items():
        draft.change(flag, degree)
    few = sharers == 1 and (size() == 1 or (size() == 2 and draft.number(INSTANCES) > 1))
    draft.workers = size() * sharers * (REPLICAS * 2 if few else REPLICAS)
    apart = draft.number(EXPERT_TENSOR, tensor) < tensor
    _shrink_expert_degrees(draft, degrees[TENSOR], degrees[CONTEXT], sharers, apart)
    if draft.has("--hierarchical-context-parallel-sizes"):
        draft.set("--hierarchical-context-parallel-sizes", degrees[CONTEXT] // 2 or 1, min(degrees[CONTEXT], 2))


def sharers_of_experts(draft: Draft) -> int:
    """How many replicas share each layer's experts; 1 where members of one do."""
    tensor = draft.number(TENSOR)
    return max(draft.number(EXPERT) * draft.number(EXPERT_TENSOR, tensor) // tensor, 1)


def _sharers(draft: Draft) -> int:
    """Two where the recipe's replicas share experts, so that each expert is in two replicas."""
    return min(sharers_of_experts(draft), 2)


def _shrink_expert_degrees(draft: Draft, tensor: int, context: int, sharers: int, apart: bool) -> None:
    """`apart`: members of a stage have other experts, in pairs or alone."""
    expert_tensor = max(tensor // 2, 1) if apart else tensor
    if not draft.has("--num-experts"):
        # Megatron's groups of experts are made all the same, and have as many members as share a layer or a sequence.
        expert_tensor = tensor * context
    draft.change(EXPERT_TENSOR, expert_tensor)
    draft.change(EXPERT, sharers * tensor // expert_tensor)


def _chunks(draft: Draft) -> int:
    """How many chunks of layers each pipeline rank has."""
    pipeline = draft.number(PIPELINE)
    if draft.has(LAYOUT):
        return len(expand(draft.text(LAYOUT))) // pipeline
    if draft.has(PER_VIRTUAL_STAGE):
        return draft.number(LAYER_COUNT) // draft.number(PER_VIRTUAL_STAGE) // pipeline
    return draft.number(VIRTUAL_STAGES)


def expand(layout: str) -> list[str]:
    """Megatron's layout string as a string of layers for each stage: `Et*2|(tt|)*2mL` is Ett, tt, tt, mL."""
    plain = layout
    while match := re.search(r"\(([^()]*)\)\*(\d+)|\(([^()]*)\)", plain):
        group, times, once = match.groups()
        plain = plain.replace(match[0], once if times is None else group * int(times), 1)
    plain = re.sub(r"([A-Za-z])\*(\d+)", lambda match: match[1] * int(match[2]), plain)
    return plain.replace(",", "").split("|")


def _shrink_layers(draft: Draft, chunks: int) -> None:
    pipeline = draft.number(PIPELINE)
    stages = pipeline * chunks
    if draft.has(LAYOUT):
        count = _shrink_layout(draft, stages)
    elif draft.has(FIRST):
        draft.change(FIRST, 1)
        draft.change(LAST, 1)
        count = 2 + max(pipeline - 2, 0) * (1 if pipeline > 3 else 2)
    else:
        counted = sum(map(draft.has, COUNTED))
        count = next(n for n in range(LAYERS, LAYERS + stages + 1) if (n + counted) % stages == 0)
    draft.change(PER_VIRTUAL_STAGE, count // stages)
    draft.change(VIRTUAL_STAGES, chunks)
    draft.set(LAYER_COUNT, count)
    _shrink_frequencies(draft, count)


def _shrink_layout(draft: Draft, stages: int) -> int:
    """A layer in each stage, in the last one what the recipe has there besides."""
    end = expand(draft.text(LAYOUT))[-1].replace("t", "")
    per_stage = max(LAYERS // stages, 1)
    layers = ["t" * per_stage] * stages
    layers[0] = "E" + layers[0]
    layers[-1] += end
    draft.set(LAYOUT, "|".join(layers))
    return per_stage * stages


def _shrink_frequencies(draft: Draft, layers: int) -> None:
    """Which layers have experts: some layers without come first, as many of four as can show it. Which have linear
    attention: all but the last one."""
    pattern = draft.text("--moe-layer-freq")
    if "[" in pattern:
        draft.set("--moe-layer-freq", f"([0]*1+[1]*{layers - 1})" if "[0]" in pattern else f"([1]*{layers})")
    pattern = draft.text("--linear-attention-freq")
    if "[" in pattern:
        draft.set("--linear-attention-freq", f"([1]*{layers - 1}+[0]*1)" if "[0]" in pattern else f"([1]*{layers})")
