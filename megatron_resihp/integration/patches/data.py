# SPDX-License-Identifier: Apache-2.0
"""Patch: data loaders. Every worker opens the data sets at the start; a new plan only moves the samplers.

Replaces training.build_pretraining_data_loader and the choice of ranks that build data sets. Micro-batch m of an
iteration is always samples [m * mbs, (m + 1) * mbs) of its global batch, whichever worker runs it (DESIGN contract 1).
Where samples are shuffled (`shuffling`), these are the places that the samples have in their order.
What a sample is must not depend on those read before it, so how a data set cuts samples for filling in, and how it
masks their losses, is replaced, too.
"""

import ctypes
import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from megatron.training.datasets.data_samplers import RandomSeedDataset

from megatron_resihp.integration.failing import fail
from megatron_resihp.integration.patches.counting import samples_of
from megatron_resihp.integration.patches.shuffling import ENDLESS, Order, Shuffled
from megatron_resihp.integration.runtime import Runtime

SAMPLE_KEY = "resihp_sample"
PR_SET_PDEATHSIG = 1


class PlanSampler:
    """Batch sampler whose cursor and share can be set anew. Yields lists of sample indices, one per micro-batch."""

    def __init__(self, total_samples: int, micro_batch_size: int, global_batch_size: int) -> None:
        self._total = total_samples
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._consumed = 0
        self._share: Sequence[int] = ()

    @property
    def micro_batches(self) -> int:
        return self._global_batch_size // self._micro_batch_size

    def move(self, consumed: int, share: Sequence[int], global_batch_size: int | None = None) -> None:
        """From the next `iter` on, start after `consumed` samples and yield the micro-batches in `share`.

        Args:
            global_batch_size: samples of each batch from then on; None: as before.
        """
        self._consumed, self._share = consumed, share
        self._global_batch_size = global_batch_size or self._global_batch_size

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[list[int]]:
        cursor, size = self._consumed, self._micro_batch_size
        while cursor + self._global_batch_size <= self._total:
            for index in self._share:
                yield list(range(cursor + index * size, cursor + (index + 1) * size))
            cursor += self._global_batch_size


class NumberedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set whose samples carry their own number, so that what was really fed can be recorded."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """`index`: of the sample; or its place in the order in which samples are read, and its index."""
        place, index = index if isinstance(index, tuple) else (index, index)
        return {**self._dataset[index], SAMPLE_KEY: int(place)}


def batch_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch that has its samples' numbers as they are: a tensor takes a file of its own on its way from a loader."""
    numbers = [sample.pop(SAMPLE_KEY) for sample in samples]
    return {**torch.utils.data.default_collate(samples), SAMPLE_KEY: numbers}


class Feed:
    """One split's loader on one worker. Loader processes are started when the first batch is wanted, once.

    Interleaved pipelines have one for each of the worker's own chunks, all of the same samples.
    """

    def __init__(self, runtime: Runtime, dataset: Any, is_eval: bool, consumed_name: str | None) -> None:
        args = runtime.job.args
        self._runtime = runtime
        self.is_eval = is_eval
        # The first chunk's, which also runs all micro-batches of a heterogeneous plan.
        self._is_recorded = not is_eval and all(feed.is_eval for feed in runtime.feeds)
        self._consumed_name = consumed_name
        size = args.eval_micro_batch_size if is_eval else args.micro_batch_size
        shuffled = args.dataloader_type == "cyclic"
        self.sampler = PlanSampler(
            ENDLESS if shuffled else len(dataset),
            size,
            args.eval_global_batch_size if is_eval else args.global_batch_size,
        )
        if shuffled and isinstance(dataset, RandomSeedDataset):
            fail("RandomSeedDataset is not supported with --resihp: it counts epochs by worker; use another data set")
        order = Order(len(dataset), size, runtime.job.own.data_parallel) if shuffled else None
        self._loader = torch.utils.data.DataLoader(
            NumberedDataset(dataset),
            batch_sampler=self.sampler if order is None else Shuffled(self.sampler, order),
            num_workers=args.num_workers,
            collate_fn=batch_of,
            pin_memory=True,
            persistent_workers=args.num_workers > 0,
            worker_init_fn=_die_with_parent if args.num_workers > 0 else None,
        )
        self._iterator: Iterator[Any] | None = None

    def rewind(self) -> None:
        """Start from Megatron's cursor with the current plan's share; batches read ahead are dropped."""
        args = self._runtime.job.args
        consumed = getattr(args, self._consumed_name) if self._consumed_name else 0
        if self._runtime.progress.replay is not None and not self.is_eval:
            consumed += samples_of(self._runtime)  # the step to come is applied already and reads nothing
        view = self._runtime.view
        share = view.evaluation_order(self.sampler.micro_batches) if self.is_eval else view.read_order
        self.sampler.move(consumed, share, None if self.is_eval else args.global_batch_size)
        self._iterator = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        batch = next(self._iterator)
        numbers = batch.pop(SAMPLE_KEY)
        if self._is_recorded:
            self._runtime.progress.fed.extend(numbers)
        if not self.is_eval:
            self._runtime.probes.ops.batch_came()
        return batch


def make_loader_builder(runtime: Runtime) -> Callable[[Any, int], Feed | None]:
    """The replacement of build_pretraining_data_loader(dataset, consumed_samples).

    Megatron asks for loaders of training, validation and test in turns, again for each chunk of an interleaved
    pipeline. Which it is, a data set of a user's own class may not say.
    """
    cursors = cycle(("consumed_train_samples", "consumed_valid_samples", None))

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Feed | None:
        consumed_name = next(cursors)
        if dataset is None:
            return None
        feed = Feed(runtime, dataset, consumed_name != "consumed_train_samples", consumed_name)
        feed.rewind()
        runtime.feeds.append(feed)
        return feed

    return build_pretraining_data_loader


def require_training_data(runtime: Runtime) -> None:
    """Any worker may have to read samples under a later plan, also where Megatron itself would never ask it to."""
    if all(feed.is_eval for feed in runtime.feeds):
        fail(
            "the script's data provider has made no training data on this worker, which may have to read some after a "
            "death; set is_distributed = True on the provider, and make its data sets on all ranks"
        )


def build_on_every_worker(original: Callable[..., None]) -> Callable[..., None]:
    """BlendedMegatronDatasetBuilder.__init__ with data sets built on all ranks: any worker may read them later."""

    def init(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any, **kwargs: Any) -> None:
        original(self, cls, sizes, lambda: True, config, **kwargs)

    return init


def wrap_query_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """GPTFIMDataset's reading of a sample, cut where a generator of its own says. Megatron's one generator for the data
    set moves with each sample that a process reads, so that a sample's cuts would follow from the plan."""

    @functools.wraps(original)
    def query_sample(self: Any, idx: int) -> Any:
        seeds = np.random.SeedSequence((self.config.random_seed, int(idx)))
        self.np_rng = np.random.RandomState(np.random.MT19937(seeds))
        return original(self, idx)

    return query_sample


def wrap_get_item(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """GPTDataset's sample, its losses masked where its own labels are padding. Megatron keeps the first sample's mask
    for all later ones, where masks don't depend on documents, and masks the first one's padding in what it keeps. So
    the losses that count would follow from which sample a process reads first."""

    @functools.wraps(original)
    def get_item(self: Any, idx: int | None) -> dict[str, Any]:
        is_first = not self.masks_and_position_ids_are_cached
        sample = original(self, idx)
        if is_first and self.masks_and_position_ids_are_cached:
            self.cached_loss_mask = torch.ones_like(self.cached_loss_mask)
        return sample

    return get_item


def _die_with_parent(_: int) -> None:
    """A forked loader keeps its dead parent's connections open, and peers would notice the death seconds late."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
