# SPDX-License-Identifier: Apache-2.0
"""Who reads which samples: Megatron's own order for equal shares, and every sample once for any others."""

from __future__ import annotations

from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

from megatron_resihp.integration.patches.data import (
    Feed,
    NumberedDataset,
    PlanSampler,
    batch_of,
    make_loader_builder,
    require_training_data,
    wrap_get_item,
    wrap_query_sample,
)
from megatron_resihp.integration.probes.probe_clock import HostClock
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.integration.progress import Progress
from megatron_resihp.integration.world.view import UniformView
from megatron_resihp.plan import ParallelPlan, Replica, deal
from megatron_resihp.protocol.records import Outcome


def batches(total: int, size: int, global_batch: int, consumed: int, share: tuple[int, ...]) -> list[list[int]]:
    sampler = PlanSampler(total, size, global_batch)
    sampler.move(consumed, share)
    return list(sampler)


class TestSampler:
    @given(
        replicas=st.integers(1, 4), each=st.integers(1, 4), size=st.integers(1, 4), iterations=st.integers(1, 5),
        done=st.integers(0, 4), odd=st.integers(0, 3),
    )  # fmt: skip
    def test_equal_shares_are_megatrons(
        self, replicas: int, each: int, size: int, iterations: int, done: int, odd: int
    ) -> None:
        global_batch = replicas * each * size
        consumed = min(done, iterations - 1) * global_batch
        total = iterations * global_batch + min(odd, global_batch - 1)
        shares = deal([each] * replicas)
        for rank in range(replicas):
            theirs = list(MegatronPretrainingSampler(total, consumed, size, rank, replicas))
            ours = batches(total, size, global_batch, consumed, shares[rank])
            # At the end of the data Megatron gives what is less than a global batch; nobody trains on that.
            assert ours == theirs[: len(ours)]
            assert len(ours) == each * ((total - consumed) // global_batch)

    @given(micro_batches=st.integers(1, 12), size=st.integers(1, 3), data=st.data())
    def test_an_iteration_is_its_global_batch_whatever_the_shares(
        self, micro_batches: int, size: int, data: st.DataObject
    ) -> None:
        """The topology changes between iterations: each reads exactly the samples that it would have read anyway."""
        global_batch = micro_batches * size
        iterations = 4
        for iteration in range(iterations):
            fed: list[int] = []
            for share in deal(data.draw(shares_of(micro_batches))):
                sampler = PlanSampler(iterations * global_batch, size, global_batch)
                sampler.move(iteration * global_batch, share)
                for index, batch in zip(share, sampler, strict=False):
                    first = iteration * global_batch + index * size
                    assert batch == list(range(first, first + size)), "micro-batch m is always the same samples"
                    fed += batch
            assert sorted(fed) == list(range(iteration * global_batch, (iteration + 1) * global_batch))

    def test_moving_the_cursor(self) -> None:
        sampler = PlanSampler(100, 2, 8)
        sampler.move(0, (0, 2))
        assert list(islice(sampler, 3)) == [[0, 1], [4, 5], [8, 9]]
        sampler.move(8, (0, 1, 2, 3))
        assert list(islice(sampler, 5)) == [[8, 9], [10, 11], [12, 13], [14, 15], [16, 17]]

    def test_the_end_of_the_data(self) -> None:
        assert batches(20, 2, 8, 8, (3,)) == [[14, 15]]
        assert batches(20, 2, 8, 16, (0,)) == []
        assert len(PlanSampler(20, 2, 8)) == 20


@st.composite
def shares_of(draw: st.DrawFn, micro_batches: int) -> list[int]:
    """A way to share out micro-batches, at least one each."""
    cuts = draw(st.sets(st.integers(1, micro_batches - 1))) if micro_batches > 1 else set()
    edges = [0, *sorted(cuts), micro_batches]
    return [end - start for start, end in pairwise(edges)]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
class TestFeed:
    """One split's loader on worker 1, which is the second of two replicas."""

    @pytest.fixture
    def runtime(self) -> Any:
        plan = ParallelPlan((Replica(((0,),), (0, 2)), Replica(((1,),), (1, 3))))
        args = SimpleNamespace(
            num_workers=0, micro_batch_size=2, global_batch_size=8, eval_micro_batch_size=1,
            eval_global_batch_size=3, consumed_train_samples=8, consumed_valid_samples=3, dataloader_type="single",
        )  # fmt: skip
        job = SimpleNamespace(args=args, own=SimpleNamespace(data_parallel=2), batch_steps=())
        return SimpleNamespace(
            job=job, view=UniformView(plan, 1, True), progress=Progress(),
            probes=Probes(1, HostClock, lambda sheet: None), feeds=[],
        )  # fmt: skip

    @pytest.fixture
    def dataset(self) -> list[dict[str, int]]:
        return [{"tokens": 100 + index} for index in range(40)]

    def take(self, feed: Feed, count: int) -> list[list[int]]:
        return [next(feed)["tokens"].tolist() for _ in range(count)]

    def test_training_goes_on_after_what_was_consumed(self, runtime: Any, dataset: Any) -> None:
        feed = Feed(runtime, dataset, False, "consumed_train_samples")
        feed.rewind()
        assert self.take(feed, 3) == [[110, 111], [114, 115], [118, 119]]
        assert runtime.progress.fed == [10, 11, 14, 15, 18, 19], "what was fed is recorded by number"

    def test_samples_that_each_chunk_reads_are_recorded_once(self, runtime: Any, dataset: Any) -> None:
        """Interleaved pipelines have loaders for each chunk; those of packed documents all read."""
        for split in (False, True, False, True):
            name = "consumed_valid_samples" if split else "consumed_train_samples"
            runtime.feeds.append(Feed(runtime, dataset, split, name))
        for feed in runtime.feeds:
            feed.rewind()
        first, _, second, _ = (self.take(feed, 2) for feed in runtime.feeds)
        assert first == second == [[110, 111], [114, 115]]
        assert runtime.progress.fed == [10, 11, 14, 15]

    def test_a_new_plan_moves_the_share_and_drops_what_was_read_ahead(self, runtime: Any, dataset: Any) -> None:
        feed = Feed(runtime, dataset, False, "consumed_train_samples")
        feed.rewind()
        self.take(feed, 1)
        runtime.view = UniformView(ParallelPlan((Replica(((1,),), (0, 1, 2, 3)),)), 1, True)
        feed.rewind()
        assert self.take(feed, 4) == [[108, 109], [110, 111], [112, 113], [114, 115]]

    def test_a_step_that_is_applied_already_reads_nothing(self, runtime: Any, dataset: Any) -> None:
        runtime.progress.replay = Outcome(0, 1.0)
        feed = Feed(runtime, dataset, False, "consumed_train_samples")
        feed.rewind()
        assert self.take(feed, 1) == [[118, 119]]

    def test_evaluation_is_shared_evenly_and_not_recorded(self, runtime: Any, dataset: Any) -> None:
        runtime.progress.replay = Outcome(0, 1.0)
        feed = Feed(runtime, dataset, True, "consumed_valid_samples")
        feed.rewind()
        assert self.take(feed, 2) == [[104], [107]]

    def test_who_has_nothing_to_evaluate_reads_what_another_does(self, runtime: Any, dataset: Any) -> None:
        runtime.job.args.eval_global_batch_size = 1
        feed = Feed(runtime, dataset, True, "consumed_valid_samples")
        feed.rewind()
        assert self.take(feed, 2) == [[103], [104]]
        assert runtime.progress.fed == []

    def test_shuffled_samples_are_recorded_by_their_places(self, runtime: Any, dataset: Any) -> None:
        runtime.job.args.dataloader_type = "cyclic"
        feed = Feed(runtime, dataset, False, "consumed_train_samples")
        feed.rewind()
        theirs = MegatronPretrainingRandomSampler(None, 40, 8, 2, 1, 2, True)
        assert self.take(feed, 3) == [[100 + index for index in batch] for batch in islice(theirs, 3)]
        assert runtime.progress.fed == [10, 11, 14, 15, 18, 19]

    @pytest.mark.parametrize("chunks", [1, 2], ids=["a chunk", "interleaved chunks"])
    def test_each_split_has_its_cursor_whatever_class_its_data_set_is_of(
        self, runtime: Any, dataset: Any, chunks: int
    ) -> None:
        """Megatron asks for loaders of the three splits in turns; a list does not say which split it is."""
        build = make_loader_builder(runtime)
        for _ in range(chunks):
            for _ in ("train", "valid", "test"):
                build(dataset, 0)
        runtime.job.args.consumed_train_samples, runtime.job.args.consumed_valid_samples = 16, 6
        for feed in runtime.feeds:  # as after a recovery
            feed.rewind()
        assert [self.take(feed, 1) for feed in runtime.feeds] == chunks * [[[118, 119]], [[107]], [[101]]]

    def test_a_split_without_data_has_its_turn(self, runtime: Any, dataset: Any) -> None:
        build = make_loader_builder(runtime)
        assert build(dataset, 0) is not None and build(None, 0) is None
        test = build(dataset, 0)
        assert test is not None and self.take(test, 1) == [[101]], "not where validation would go on"

    def test_samples_keep_their_fields(self, dataset: Any) -> None:
        numbered = NumberedDataset(dataset)
        assert len(numbered) == 40 and numbered[7] == {"tokens": 107, "resihp_sample": 7}
        assert dataset[7] == {"tokens": 107}, "the user's sample is left alone"

    def test_a_batch_has_no_more_tensors_than_without_the_plugin(self, dataset: Any) -> None:
        """A loader process opens a file for each."""
        batch = batch_of([NumberedDataset(dataset)[index] for index in (3, 4)])
        tensors = {name: each.tolist() for name, each in batch.items() if torch.is_tensor(each)}
        assert tensors == {"tokens": [103, 104]}


def test_a_sample_is_cut_the_same_whatever_was_read_before_it() -> None:
    """Megatron's data set of samples to fill in has one generator for all of them."""
    dataset = SimpleNamespace(config=SimpleNamespace(random_seed=7), np_rng=None)

    def cut(dataset: Any, idx: int) -> list[int]:
        return [int(number) for number in dataset.np_rng.randint(0, 1000, size=8)]

    query = wrap_query_sample(cut)
    first, second = query(dataset, 0), query(dataset, 1)
    assert first != second
    assert query(dataset, 1) == second and query(dataset, 0) == first
    dataset.config.random_seed = 8
    assert query(dataset, 0) != first


class PaddingTokenizer(NullTokenizer):
    """Megatron's wrapper of tokenizers, which has `pad`, needs files of its own."""

    @property
    def pad(self) -> int:
        return int(self.pad_id)


class MaskedSamples(MockGPTDataset):
    """As a job with --resihp reads them."""

    __getitem__ = wrap_get_item(MockGPTDataset.__getitem__)


@pytest.mark.parametrize(("pad", "flags"), [(5, {}), (63, {"allow_ambiguous_pad_tokens": True})])
def test_a_samples_losses_are_masked_the_same_whatever_was_read_before_it(pad: int, flags: dict[str, Any]) -> None:
    """Megatron keeps the mask of the first sample that a process reads, its padding masked."""

    def reads(kind: type, first: int) -> list[list[float]]:
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=512, split="1", tokenizer=PaddingTokenizer(64, pad_id=pad),
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, **flags,
        )  # fmt: skip
        dataset = BlendedMegatronDatasetBuilder(kind, [16, 0, 0], lambda: True, config).build()[0]
        return [dataset[each]["loss_mask"].tolist() for each in (first, *range(8))][1:]

    assert reads(MockGPTDataset, 0) != reads(MockGPTDataset, 1), "stock Megatron's depend on it"
    masks = reads(MaskedSamples, 0)
    assert masks == reads(MaskedSamples, 1)
    assert all(0 < sum(mask) < 512 for mask in masks)


def test_a_provider_that_makes_no_data_on_some_workers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron asks one without `is_distributed` on the first member of each stage only."""
    feeds: list[Any] = [SimpleNamespace(is_eval=is_eval) for is_eval in (False, True, True)]
    require_training_data(SimpleNamespace(feeds=feeds))  # type: ignore[arg-type]
    for some in ([], feeds[1:]):
        with pytest.raises(SystemExit) as ended:
            require_training_data(SimpleNamespace(feeds=some))  # type: ignore[arg-type]
        assert ended.value.code == 2 and "is_distributed = True" in capsys.readouterr().err
