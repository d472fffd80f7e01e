# SPDX-License-Identifier: Apache-2.0
"""Tensors created on, or moved to, a CUDA device stay on the CPU. May import torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_resihp.cpu.device_memory import place

FUNCTIONS = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda(device: Any) -> bool:
    """Whether torch would treat `device` as a CUDA device; a bare index means one."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int)


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same factory, with the CPU in place of a CUDA device and plain memory in place of pinned memory."""

    @functools.wraps(function)
    def factory(*arguments: Any, **options: Any) -> Any:
        if options:
            options.pop("pin_memory", None)
            if is_cuda(options.get("device")):
                options["device"] = "cpu"
                return place(function(*arguments, **options))
        return function(*arguments, **options)

    return factory


def _moving_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def move(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if arguments and is_cuda(arguments[0]):
            arguments = ("cpu", *arguments[1:])
        elif options and is_cuda(options.get("device")):
            options["device"] = "cpu"
        else:
            return to(tensor, *arguments, **options)
        moved = to(tensor, *arguments, **options)
        return moved if moved is tensor else place(moved)

    return move


def _naming_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron checks that gradients and parameters have the type `torch.cuda.FloatTensor` or the like."""

    @functools.wraps(type_of)
    def name_or_convert(tensor: torch.Tensor, dtype: Any = None, *arguments: Any, **options: Any) -> Any:
        if dtype is None:
            return type_of(tensor).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_of(tensor, dtype, *arguments, **options)

    return name_or_convert


def install() -> None:
    for name in FUNCTIONS:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.to = _moving_to_cpu(torch.Tensor.to)
    torch.Tensor.type = _naming_cuda(torch.Tensor.type)
    torch.Tensor.cuda = lambda tensor, *_arguments, **_options: tensor
    torch.Tensor.pin_memory = lambda tensor, *_arguments, **_options: tensor
