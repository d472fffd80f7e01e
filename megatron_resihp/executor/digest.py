"""A digest of a shard's state that its holders compare. May import torch."""

import hashlib
from collections.abc import Mapping

import torch

CHUNK = 1 << 22
"""Words hashed at a time; bounds the extra memory."""

_MODULUS = (1 << 61) - 1


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Sixteen hexadecimal digits over names, shapes, types and bits of all tensors, in name order."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_hash(tensor)}\n".encode())
    return total.hexdigest()[:16]


def _hash(tensor: torch.Tensor) -> int:
    """A position-dependent sum over the words of a tensor, computed where the tensor lives."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    words = flat.view(width)
    value = 0
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        # Odd multipliers: no single changed bit can vanish, and swapped words show.
        weights = torch.arange(1, 2 * chunk.numel() + 1, 2, device=chunk.device)
        value = (value * 1_000_003 + int((chunk * weights).sum())) % _MODULUS
    return value
