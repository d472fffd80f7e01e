# SPDX-License-Identifier: Apache-2.0
"""Random numbers of the one device: `torch.cuda`'s generator is the CPU's default one. May import torch."""

import functools
import logging
from typing import Any

import torch
from torch.utils.data import dataloader

MEGATRON_RANDOM_LOGGER = "megatron.core.tensor_parallel.random"


def _is_worth_reporting(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install() -> None:
    """Let `torch.cuda`'s own functions work on the CPU's default generator.

    Dropout and initialization draw from that generator on a CPU, so Megatron's tracker must save, fork and restore
    exactly that one. Marking CUDA as initialized makes torch.cuda act at once instead of queueing for later.
    """
    torch.cuda._initialized = True
    # There is no CUDA context that a fork could break: jobs may be forked from a parent that has imported all this.
    torch.cuda._is_in_bad_fork = lambda: False
    # torch.cuda.random holds its own references to these two.
    torch.cuda.random.current_device = torch.cuda.current_device
    torch.cuda.random.device_count = torch.cuda.device_count
    torch.cuda.default_generators = (torch.default_generator,)
    # Megatron warns when the CPU's generator moves inside a fork of the device's; here they are one.
    logging.getLogger(MEGATRON_RANDOM_LOGGER).addFilter(_is_worth_reporting)
    _keep_data_loading_apart()


def _keep_data_loading_apart() -> None:
    """Draw a data loader's seed without moving the generator.

    Only some tensor-parallel ranks load data. On a GPU machine that moves the host's generator alone; here it would
    give the ranks of one tensor-parallel group different dropout masks where they must agree.
    """
    original = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(original)
    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        state = torch.get_rng_state()
        original(self, *arguments, **options)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = initialize
