# SPDX-License-Identifier: Apache-2.0
"""The stand-in that lets unmodified Megatron train on CPUs with gloo.

Call `install()` before Megatron starts. It replaces the parts of `torch` and Megatron that need a GPU, one small
module per part; each names what it replaces and why. This package may import torch, numpy and megatron, and nothing
else of megatron_resihp. Importing it imports neither torch nor megatron.
"""

_installed = False


def installed() -> bool:
    """Whether the stand-in is in place in this process."""
    return _installed


def counts_memory() -> bool:
    """Whether `torch.cuda` says what is on the device: real devices do, the stand-in's if its memory has a size."""
    import torch

    if not _installed:
        return torch.cuda.is_available()
    from megatron_resihp.cpu import device_memory

    return device_memory.current() is not None


def install(force: bool = False) -> bool:
    """Put the stand-in in place and say whether it is; where real CUDA devices exist, do nothing unless forced.

    Works before and after Megatron's first import. Calling it again changes nothing.
    """
    global _installed
    if _installed:
        return True

    import torch

    if torch.cuda.is_available() and not force:
        return False

    from megatron_resihp.cpu import compilation, device_memory, distributed, factories, random_state, torch_cuda

    torch_cuda.install()
    random_state.install()
    factories.install()
    device_memory.install()
    distributed.install()
    compilation.install()

    from megatron_resihp.cpu import (
        attention_logits,
        checkpoint_writer,
        dataset_helpers,
        latent_attention,
        linear_attention,
        megatron_parts,
        recomputation,
    )

    dataset_helpers.install()
    attention_logits.install()
    latent_attention.install()
    megatron_parts.install()
    linear_attention.install()
    recomputation.install()
    checkpoint_writer.install()
    _installed = True
    return True
