# SPDX-License-Identifier: Apache-2.0
"""Arguments that Megatron derives from the degree of tensor parallelism, held against its own validation."""

from __future__ import annotations

import argparse
import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import arguments
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_resihp.integration.patches.arguments import flags
from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import Sizes
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

FLAGS = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64
    --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8
    --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local
    --no-persist-layer-norm --no-gradient-accumulation-fusion --sequence-parallel
""".split()
LAYERS = 6
"""Those of the model, the embedding and the head."""


@pytest.fixture(scope="module")
def parsed() -> argparse.Namespace:
    parser = flags.wrap_add_megatron_arguments(arguments.add_megatron_arguments)(argparse.ArgumentParser())
    args = parser.parse_args(FLAGS)
    args.rank, args.world_size = 0, 8
    return args


@pytest.fixture
def job(parsed: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.Namespace, DerivedArguments]:
    """A job's arguments, validated, and what Megatron derives from them."""
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    args = copy.deepcopy(parsed)
    derived = DerivedArguments(arguments.validate_args, args, {})
    arguments.validate_args(args, {})
    return args, derived


@pytest.mark.parametrize("connections", [None, "8"])
def test_a_job_without_tensor_parallelism_may_have_begun_with_more_connections(
    parsed: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, connections: str | None
) -> None:
    """Before Blackwell Megatron asserts that there is one as soon as a stage has several members."""
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    args = copy.deepcopy(parsed)
    args.tensor_model_parallel_size, args.sequence_parallel = 1, False
    assert DerivedArguments(arguments.validate_args, args, {}).of_degree(2)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def stage(degree: int) -> HeterogeneousView:
    replica = Replica((tuple(range(degree)),), (0,), (Chunk(0, 0, LAYERS),))
    return HeterogeneousView(ParallelPlan((replica,)), 0, None)


@pytest.mark.since_megatron("0.19")
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_config_made_from_the_arguments_is_that_of_the_stage(job: Any, degree: int) -> None:
    """Megatron's own script makes one for each micro-batch."""
    args, derived = job
    Sizes(256, derived, args).replace(stage(degree))
    config = core_transformer_config_from_args(args)
    assert config.tensor_model_parallel_size == degree
    assert config.tensor_parallel_num_weight_shards == config.expert_tensor_parallel_num_weight_shards == degree
    assert config.gtp_weight_remat_size == 1, "a stage of fewer members cuts its weights once more"


def test_the_jobs_own_arguments_come_back(job: Any) -> None:
    args, derived = job
    before = dict(vars(args))
    sizes = Sizes(256, derived, args)
    for degree in (4, 1):
        sizes.replace(stage(degree))
        assert vars(args) != before
    own = dict(sizes.own(args))
    sizes.restore()
    assert vars(args) == before
    assert own.items() <= before.items()


@pytest.mark.since_megatron("0.19")
def test_what_megatron_derives_from_the_degree_is_among_them(job: Any) -> None:
    args, derived = job
    sizes = Sizes(256, derived, args)
    sizes.replace(stage(4))
    assert "tensor_parallel_num_weight_shards" in sizes.own(args)


def test_arguments_of_the_future_are_found() -> None:
    """What another release derives is rewritten without being named here; what stays the same is left alone."""

    def validate(args: Any, defaults: dict[str, Any]) -> None:
        args.data_parallel_size = args.world_size // (args.tensor_model_parallel_size * 2)
        args.shards_of_the_future = 3 * args.tensor_model_parallel_size
        args.layout_of_the_future = SimpleNamespace(parts=args.tensor_model_parallel_size // 4)

    args = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=1, world_size=8
    )
    derived = DerivedArguments(validate, args, {})
    assert derived.of_degree(1) == {"shards_of_the_future": 3, "tensor_model_parallel_size": 1}
    assert derived.of_degree(4)["layout_of_the_future"].parts == 1
    assert derived.of_degree(2) == {}


def test_a_degree_that_megatron_refuses_is_named(job: Any) -> None:
    def validate(args: Any, defaults: dict[str, Any]) -> None:
        assert args.tensor_model_parallel_size < 4, "too many"

    args, _ = job
    with pytest.raises(RuntimeError, match="Megatron refuses stages of 4 TP members: too many"):
        DerivedArguments(validate, args, {}).of_degree(4)
