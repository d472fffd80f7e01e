# SPDX-License-Identifier: Apache-2.0
"""A digest of a shard's state that its holders compare. May import torch."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

CHUNK = 1 << 22
"""Words hashed at a time; bounds the extra memory."""
KEPT = 1 << 14
"""For so many words numbers of their positions are kept on each device: most states have many small slices."""
WORD_BYTES = 8
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""

_MODULUS = 1 << 64
_POSITION, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Large odd numbers; multiplying by one loses nothing."""


def digest_tensors(tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> str:
    """Sixteen hexadecimal digits over names, shapes, types and bits of all tensors, in name order.

    Args:
        device: where tensors that are elsewhere are brought one by one, other than scalars; None: nowhere.
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    hashes = [_hash(run) for run in _runs(_at(device, tensors[name]) for name in sorted(tensors))]
    for value in _numbers(hashes):
        total.update(f"{value % _MODULUS}\n".encode())
    return total.hexdigest()[:16]


def _at(device: torch.device | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if device is None or not tensor.dim() else tensor.to(device)


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors' bits as words, one tensor after the other; small tensors together, as hashing each alone is slow."""
    waiting: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        numbers = flat.view(WHOLE_NUMBERS[flat.element_size()])
        alike = not waiting or (numbers.dtype, numbers.device) == (waiting[0].dtype, waiting[0].device)
        if waiting and (not alike or count + numbers.numel() > CHUNK):
            yield _words(waiting)
            waiting, count = [], 0
        waiting.append(numbers)
        count += numbers.numel()
    if waiting:
        yield _words(waiting)


def _words(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Integer tensors, concatenated and padded with zeros, as words; a view of the tensor where possible."""
    in_word = WORD_BYTES // numbers[0].element_size()
    lacking = -sum(each.numel() for each in numbers) % in_word
    if len(numbers) == 1 and not lacking and numbers[0].storage_offset() % in_word == 0:
        return numbers[0].view(torch.int64)
    return torch.cat([*numbers, numbers[0].new_zeros(lacking)]).view(torch.int64)


def _hash(words: torch.Tensor) -> torch.Tensor:
    """A sum over the words of a tensor, each scrambled with its position, modulo 2^64; a scalar where the tensor lives.

    Unscrambled words would not do: replicas that drift apart differ by ±1 in many words, and these differences cancel.
    """
    value = words.new_zeros(())
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].clone()
        # Each step is one-to-one modulo 2^64: no single changed bit can vanish, and swapped words change the sum.
        chunk ^= _positions(chunk)
        chunk *= _FIRST
        chunk ^= chunk >> 32 & 0xFFFFFFFF
        chunk *= _SECOND
        chunk ^= chunk >> 29 & 0x7FFFFFFFF
        value = value * 1_000_003 + chunk.sum()
    return value


def _positions(words: torch.Tensor) -> torch.Tensor:
    """A number for each word's position, that spreads over all bits."""
    count = words.numel()
    if count > KEPT:
        return torch.arange(count, device=words.device) * _POSITION
    return _first_positions(words.device)[:count]


@cache
def _first_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(KEPT, device=device) * _POSITION


def _numbers(scalars: Sequence[torch.Tensor]) -> list[int]:
    """Scalars from several devices, each device asked once: the host waits for all that it computes."""
    found: dict[int, int] = {}
    for device in {scalar.device for scalar in scalars}:
        places = [place for place, scalar in enumerate(scalars) if scalar.device == device]
        found.update(zip(places, torch.stack([scalars[place] for place in places]).tolist(), strict=True))
    return [found[place] for place in range(len(scalars))]
