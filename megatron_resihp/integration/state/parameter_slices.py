# SPDX-License-Identifier: Apache-2.0
"""A worker's parameters, and whatever is shaped like them, as slices: views, so that reading and writing copy nothing.

May import torch and `plan`. Names are Megatron's, below the layer; so they agree between holders of a slice however
their shards are cut. A gated MLP's first weight holds a part of the gate and the same part of the up-projection
(`partition_stride`), and a slice has a part of both; query groups and heads are contiguous. A gated delta net joins
projections of unlike lengths in one weight (`sections_of`), and a slice has a part of each.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from megatron_resihp.plan import Shard
from megatron_resihp.plan.experts import dealt_experts
from megatron_resihp.plan.replica import experts_of
from megatron_resihp.plan.slices import NO_EXPERT, TIED, WHOLE, Slice, cuts_of_shard, expert_cuts_of_shard

LAYERS = "decoder.layers."
EMBEDDING = "embedding."
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
TIED_NAME = "word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm."
_LAYER_OF_EXPERT: Final = r"\.experts\.(?:local_experts\.\d+\.linear_fc{0}\.{1}|linear_fc{0}\.{1}\d+)$"
FIRST_OF_EXPERT: Final = re.compile(_LAYER_OF_EXPERT.format(1, "(?:weight|bias)"))
"""An expert's first weight. For Transformer Engine's, Megatron 0.19 says a stride of one, also where each holds a part
of the gate and of the up-projection."""
SECOND_OF_EXPERT: Final = re.compile(_LAYER_OF_EXPERT.format(2, "weight"))
"""An expert's second weight. For some of Transformer Engine's, Megatron 0.18 says the other dimension."""

EXPERT: Final = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(?:(?<=\.)(\d+)|(\d+)$)")
"""The number of an expert among this worker's own, in either kind of layer."""
States = Mapping[int, Mapping[str, torch.Tensor]]
"""What `shard.states_of` gives."""
OFFSETS: Final = "core_attention.softmax_offset"
"""Learnt offsets of attention, one for each head. Megatron cuts them with the heads, and doesn't mark them as cut."""


@dataclass(frozen=True)
class Piece:
    """A parameter's part in a slice.

    Attributes:
        slice: which one.
        name: of the parameter within its layer.
        parameter: the parameter, or a buffer.
        chunk: index of the model chunk that it is in, among this worker's own.
        dim, stride, count, index: the part of a tensor shaped like the parameter: part `index` of `count` of each of
            `stride` blocks along `dim`; all of it if `count` is 0.
        start, length: the section along `dim` that is cut so.
    """

    slice: Slice
    name: str
    parameter: Any
    chunk: int
    dim: int = 0
    stride: int = 1
    count: int = 0
    index: int = 0
    start: int = 0
    length: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor that is shaped like the parameter."""
        if not self.count:
            return tensor
        whole = self.length == tensor.shape[self.dim]
        section = tensor if whole else tensor.narrow(self.dim, self.start, self.length)
        before, after = section.shape[: self.dim], section.shape[self.dim + 1 :]
        length = self.length // (self.stride * self.count)
        # As `unflatten`, which takes three times as long; a recovery does this thousands of times.
        parts = section.view(*before, self.stride, self.count, length, *after)
        return parts.select(self.dim + 1, self.index)


class Beside(NamedTuple):
    """A copy of experts that no module here has.

    Attributes:
        shards: what their owner holds.
        pieces: of tensors that stand for their parameters.
        states: of these, as `states_of` gives them.
    """

    shards: Sequence[Shard]
    pieces: Sequence[Piece]
    states: States


def pieces_of(
    model: Sequence[Any], shards: Sequence[Shard], cuts: int, tied_head: int | None, shares: int = 1
) -> Iterator[Piece]:
    """All pieces of a worker's model.

    Args:
        model: its chunks, in the order of `shards`.
        shards: what each of them holds.
        cuts: into how many cuts layers are thought.
        tied_head: number of the head's layer if it has the word embeddings, too.
        shares: into how many shares each layer's experts are thought; 1: they are no slices of their own.

    Raises:
        ValueError: a parameter can't be cut so.
    """
    for chunk, (module, shard) in enumerate(zip(model, shards, strict=True)):
        parameters: dict[str, Any] = {name.replace("module.", ""): each for name, each in module.named_parameters()}
        sections = sections_of(module)
        for name, parameter in parameters.items():
            layer, inner = place_of(name, shard, tied_head, module, parameters)
            share, inner = expert_of(inner, shard, module.config, shares) if shares > 1 else (NO_EXPERT, inner)
            offsets = name.endswith(OFFSETS)
            cuts_of = expert_cuts_of_shard if EXPERT.search(name) else cuts_of_shard
            if not (offsets or getattr(parameter, "tensor_model_parallel", False)):
                yield Piece(Slice(layer, WHOLE, share), inner, parameter, chunk)
                continue
            numbers = cuts_of(shard, cuts)
            dim, stride = (0, 1) if offsets else (parameter.partition_dim, getattr(parameter, "partition_stride", 1))
            if FIRST_OF_EXPERT.search(name) and module.config.gated_linear_unit:
                stride = 2
            if SECOND_OF_EXPERT.search(name):
                dim = 1
            for section, start, length in sections.get(name, (("", 0, parameter.shape[dim]),)):
                if length % (stride * len(numbers)):
                    raise ValueError(f"{name}, {length} along {dim}, can't be cut in {len(numbers)} parts")
                part = inner + section, parameter, chunk, dim, stride, len(numbers)
                for index, number in enumerate(numbers):
                    yield Piece(Slice(layer, number, share), *part, index, start, length)


def sections_of(chunk: Any) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """By parameter, the sections that it joins along the dimension in which it is cut, each of which is cut by itself:
    an ending for the parameter's name, where the section begins, and its length.

    Megatron's gated delta net has all projections of its input in one weight, and convolutions of the first three in
    another (`GatedDeltaNet.sharded_state_dict`).
    """
    found: dict[str, tuple[tuple[str, int, int], ...]] = {}
    for path, module in _delta_nets(chunk):
        queries, values, heads = module.qk_dim_local_tp, module.v_dim_local_tp, module.num_value_heads // module.tp_size
        lengths = {
            "query": queries, "key": queries, "value": values, "gate": values, "beta": heads, "alpha": heads
        }  # fmt: skip
        starts = (end - length for end, length in zip(accumulate(lengths.values()), lengths.values(), strict=True))
        sections = tuple(
            (f"[{name}]", start, length) for (name, length), start in zip(lengths.items(), starts, strict=True)
        )
        prefix = path.replace("module.", "")
        found |= {f"{prefix}.in_proj.{kind}": sections for kind in ("weight", "bias")}
        found |= {f"{prefix}.conv1d.{kind}": sections[:3] for kind in ("weight", "bias")}
    return found


def output_norms(model: Iterable[Any]) -> Iterator[Any]:
    """The norms behind the heads of gated delta nets, which all heads share."""
    for chunk in model:
        for _, module in _delta_nets(chunk):
            yield module.out_norm


def _delta_nets(chunk: Any) -> Iterator[tuple[str, Any]]:
    if getattr(chunk.config, "experimental_attention_variant", None) == "gated_delta_net":
        for path, module in chunk.named_modules():
            if hasattr(module, "conv_dim_local_tp"):
                yield path, module


def expert_of(inner: str, shard: Shard, config: Any, shares: int) -> tuple[int, str]:
    """The share of experts that a parameter is in, and its name with the expert's number among all of its layer.

    Args:
        inner: its name within its layer, with its number among this worker's own.
        shard: that it belongs to.
        config: Megatron's, of the model.
        shares: of the experts.
    """
    own = number_of_expert(inner)
    if own is None:
        return NO_EXPERT, inner
    part = experts_of(shard)
    number = dealt_experts(config.num_moe_experts, part.degree)[part.rank].start + own
    return number * shares // config.num_moe_experts, renumbered(inner, number)


def number_of_expert(name: str) -> int | None:
    """An expert's number in a parameter's name; None: it is no expert's."""
    found = EXPERT.search(name)
    return None if found is None else int(found[2] or found[3])


def renumbered(name: str, number: int) -> str:
    """The same parameter's name in another expert of the layer."""
    found = EXPERT.search(name)
    assert found is not None, f"{name} is no expert's"
    return f"{name[: found.end(1)]}{number}{name[found.end() :]}"


def lasting_names(chunk: Any) -> Iterator[tuple[str, Any]]:
    """A chunk's parameters. Names have the numbers of experts among all of their layer, whichever this worker has."""
    layers = dict(chunk.named_modules())
    for name, parameter in chunk.named_parameters():
        found = EXPERT.search(name)
        if found is not None:
            first = layers[name[: found.start()]].local_expert_indices[0]
            name = renumbered(name, first + int(found[2] or found[3]))
        yield name, parameter


def whole_pieces(
    model: Sequence[Any], shards: Sequence[Shard], tied_head: int | None,
    named: Callable[[Any], Iterable[tuple[str, torch.Tensor]]],
) -> Iterator[Piece]:  # fmt: skip
    """Pieces of tensors that are no parameters. All members of a stage hold these whole.

    Args:
        model, shards, tied_head: as of `pieces_of`.
        named: gives those of a chunk, with names below it.
    """
    for chunk, (module, shard) in enumerate(zip(model, shards, strict=True)):
        for name, tensor in named(module):
            layer, inner = place_of(name.replace("module.", ""), shard, tied_head, module)
            yield Piece(Slice(layer, WHOLE), inner, tensor, chunk)


def counted_by_megatron(piece: Slice, name: str, view: torch.Tensor, cuts: int, own_degree: int) -> torch.Tensor:
    """What Megatron counts of a slice's part of a parameter, in norms and numbers of zeros.

    It takes the offsets of all but the first tensor-parallel member for copies of the first one's.

    Args:
        view: of a tensor that is shaped like the parameter.
        cuts: into how many cuts layers are thought.
        own_degree: tensor-parallel degree of the job's own layout.
    """
    if not name.endswith(OFFSETS):
        return view
    heads = view.numel()
    return view.flatten()[: max(0, heads * cuts // own_degree - heads * piece.cut)]


def place_of(
    name: str, shard: Shard, tied_head: int | None, chunk: Any, beside: Collection[str] = ()
) -> tuple[int, str]:  # fmt: skip
    """The layer of a parameter or module, and its name there.

    Args:
        chunk: that it belongs to.
        beside: names of all parameters of the chunk.
    """
    if tied_head is not None and name == WORD_EMBEDDINGS:
        return TIED, TIED_NAME
    # Beside word embeddings, Megatron gives a head weights only if they are others.
    if tied_head is not None and name == OUTPUT and WORD_EMBEDDINGS not in beside:
        return TIED, TIED_NAME
    if tied_head is not None and name.startswith(FINAL_NORM) and chunk.config.mtp_num_layers:
        return tied_head - 1, name  # Megatron builds it behind the last decoder layer then, not before the head
    if name.startswith(LAYERS):
        number, _, inner = name.removeprefix(LAYERS).partition(".")
        return max(shard.first, 1) + int(number), inner
    if name.startswith(EMBEDDING):
        return 0, name
    return shard.end - 1, name
