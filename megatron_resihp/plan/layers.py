# SPDX-License-Identifier: Apache-2.0
"""Which layers each stage runs, as model chunks and in the words of Megatron's pipeline layout.

Layers are numbered from 0, the embedding, to the last one, the head. Layers that predict further tokens (multi-token
prediction, "m") are a part of the head and have no number: Megatron runs all of them where the head is. Imports only
the standard library.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from megatron_resihp.plan.errors import PlanError

EMBEDDING, DECODER, PREDICTION, HEAD = "E", "t", "m", "L"
_MOST: Final = 10_000


class Chunk(NamedTuple):
    """A run of layers that one stage of a pipeline holds; chunks follow each other in the order of the layers.

    Attributes:
        stage: which stage holds it. One stage may hold several chunks (interleaving).
        first, end: its layers are first, …, end − 1; none if both are equal.
    """

    stage: int
    first: int
    end: int


def check_chunks(chunks: Sequence[Chunk], stages: int) -> None:
    """Raises PlanError unless the chunks hold each layer exactly once, and each stage has at least one chunk."""
    following = 0
    for number, chunk in enumerate(chunks):
        if not 0 <= chunk.stage < stages:
            raise PlanError(f"chunk {number} is on stage {chunk.stage}; stages are 0 to {stages - 1}")
        if chunk.end < chunk.first:
            raise PlanError(f"chunk {number} ends before its first layer, {chunk.first}")
        if chunk.first > following:
            raise PlanError(f"layer {following} is missing")
        if chunk.first < following:
            raise PlanError(f"layer {chunk.first} stands twice")
        following = chunk.end
    idle = sorted(set(range(stages)) - {chunk.stage for chunk in chunks})
    if idle:
        raise PlanError(f"stage {idle[0]} has no chunk; give it a chunk without layers if it is to hold none")


def in_turns(stage_of_chunk: Sequence[int], stages: int) -> bool:
    """Whether chunks are dealt to the stages as Megatron does: 0, 1, …, 0, 1, …"""
    return len(stage_of_chunk) % stages == 0 and list(stage_of_chunk) == [
        number % stages for number in range(len(stage_of_chunk))
    ]


def interleaves(chunks: Sequence[Chunk]) -> bool:
    """Whether some stage holds several of them."""
    return len({chunk.stage for chunk in chunks}) < len(chunks)


def chunks_from(counts: Sequence[int], stages: int) -> tuple[Chunk, ...]:
    """Chunks of the given numbers of layers, dealt to the stages in turns as Megatron does.

    Raises:
        PlanError: the number of chunks is no multiple of the number of stages, or a count is negative.
    """
    if stages < 1 or not counts or len(counts) % stages:
        raise PlanError(f"{len(counts)} chunks can't be dealt to {stages} stages")
    ends = [0, *accumulate(counts)]
    chunks = tuple(Chunk(number % stages, *ends[number : number + 2]) for number in range(len(counts)))
    check_chunks(chunks, stages)
    return chunks


def even_chunks(decoder_layers: int, stages: int) -> tuple[Chunk, ...]:
    """Megatron's own split: equally many decoder layers in each stage, embedding in the first, head in the last.

    Args:
        decoder_layers: layers between embedding and head.
        stages: number of stages.

    Raises:
        PlanError: the layers cannot be split evenly.
    """
    each, rest = divmod(decoder_layers, stages)
    if rest:
        raise PlanError(f"{decoder_layers} layers can't be split evenly over {stages} stages")
    counts = [each] * stages
    counts[0] += 1
    counts[-1] += 1
    return chunks_from(counts, stages)


def parse_layout(text: str) -> tuple[str, ...]:
    """Megatron's `--pipeline-model-parallel-layout` → the letters of each chunk: "E|t*2|(t,t|)*2m,L" → ("E", "tt", …).

    Raises:
        PlanError: not a layout: unknown letters, or not one E first, one L last, and every t before any m.
    """
    letters = text.replace(",", "")
    # First expand parentheses, which may hold repeated letters themselves.
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        letters = re.sub(repeated, _unroll, letters)
        if len(letters) > _MOST:
            raise PlanError(f"layout {text!r} has more than {_MOST} layers")
    unknown = sorted(set(letters) - {*(EMBEDDING, DECODER, PREDICTION, HEAD), "|"})
    if unknown:
        raise PlanError(f"layout {text!r}: {unknown[0]!r} is not a layer; layers are E, t, m and L")
    chunks = tuple(letters.split("|"))
    if not re.fullmatch("Et*m*L", "".join(chunks)):
        raise PlanError(f"layout {text!r} must begin with its only E, go on with t, then m, and end with its only L")
    return chunks


def _unroll(found: re.Match[str]) -> str:
    times = int(found[2]) if len(found[2]) < 6 else _MOST + 1
    return found[1] * min(times, _MOST + 1)


def format_layout(chunks: Sequence[str]) -> str:
    """The letters of each chunk → Megatron's layout: ("E", "ttttt", "tmL") → "E|t*5|t,m,L"."""
    return "|".join(",".join(_run(letter, len([*run])) for letter, run in groupby(letters)) for letters in chunks)


def _run(letter: str, times: int) -> str:
    return letter if times == 1 else f"{letter}*{times}"


def chunks_of_layout(text: str, stages: int) -> tuple[Chunk, ...]:
    """The chunks that Megatron makes of a layout with this number of pipeline stages.

    Raises:
        PlanError: the text is no layout, the number of chunks is no multiple of the number of stages, or some chunk but
            the head's predicts further tokens.
    """
    *others, last = parse_layout(text)
    if any(PREDICTION in letters for letters in others):
        raise PlanError(f"layout {text!r}: {PREDICTION} and {HEAD} must be in the same chunk, the last one")
    return chunks_from([*map(len, others), len(last) - last.count(PREDICTION)], stages)


def layout_of(chunks: Sequence[Chunk], letters: Sequence[str]) -> str:
    """Chunks of a model in Megatron's layout notation.

    Args:
        chunks: all chunks of a replica.
        letters: of each of the model's layers, as in ("E", "t", "t", "mL").

    Raises:
        PlanError: the chunks hold another number of layers, or are not dealt to the stages in turns; Megatron has no
            notation for that.
    """
    _check_sayable(chunks, len(letters))
    return format_layout(["".join(letters[chunk.first : chunk.end]) for chunk in chunks])


def _check_sayable(chunks: Sequence[Chunk], layers: int) -> None:
    if not chunks or chunks[-1].end != layers:
        raise PlanError(f"the chunks hold {chunks[-1].end if chunks else 0} layers, the model has {layers}")
    stages = 1 + max(chunk.stage for chunk in chunks)
    if not in_turns([chunk.stage for chunk in chunks], stages):
        raise PlanError("Megatron deals chunks to the stages in turns; these are placed otherwise")
