# SPDX-License-Identifier: Apache-2.0
"""Megatron itself trains a tiny model on packed documents in two CPU processes.

This file is the training script as well: the tests start it under torchrun, and its last rank prints what they check.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

DOCUMENTS = [7, 20, 1, 4]
TOKENS = sum(DOCUMENTS)
VOCABULARY = 64
ITERATIONS = 8
MICRO_BATCHES = 3
TIMEOUT_SECONDS = 120
RESULT_MARK = "RESULT "


@pytest.mark.nightly
def test_tensor_parallel_processes_learn_packed_documents():
    result = start_training("-m", "megatron_resihp.cpu", __file__, "2", "1")
    check_learning(result["losses"])
    # One attention per document must be the model's plain attention under a block-diagonal mask.
    assert result["packed loss"] == pytest.approx(result["masked loss"], rel=1e-6)
    assert result["packed gradients"] == pytest.approx(result["masked gradients"], rel=1e-4)
    # Sequence parallelism: each rank saw half of the tokens, and the norms must have learned from all.
    assert result["norms of rank 0"] == result["norms of rank 1"]


@pytest.mark.nightly
def test_pipeline_parallel_processes_learn_packed_documents():
    """Started without the module, so that the script installs the stand-in after it has imported Megatron."""
    check_learning(start_training(__file__, "1", "2")["losses"])


def check_learning(losses):
    assert len(losses) == ITERATIONS
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert losses[-1] < 0.8 * losses[0]


def start_training(*command: str) -> dict:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*launcher, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert finished.returncode == 0, finished.stderr
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith(RESULT_MARK))
    return json.loads(line.removeprefix(RESULT_MARK))


# ---- the training script


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel

    from megatron_resihp import cpu

    assert cpu.install() and cpu.installed()
    tensor_size, pipeline_size = map(int, sys.argv[1:])
    torch.distributed.init_process_group(backend="nccl")
    parallel_state.initialize_model_parallel(tensor_size, pipeline_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_model(tensor_size, pipeline_size)
    result = compare_packed_with_masked(model) if pipeline_size == 1 else {}
    result |= {"losses": train(model)} | norms(model)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(RESULT_MARK + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


def build_model(tensor_size: int, pipeline_size: int) -> torch.nn.Module:
    """A GPT with what the stand-in has to carry: RMSNorm, GQA and, where there are peers, sequence parallelism."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        sequence_parallel=tensor_size > 1,
        gradient_accumulation_fusion=True,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, settings, model.cuda())


def micro_batch() -> dict[str, torch.Tensor]:
    """Documents that count upwards, each from another start: easy to learn, and wrong if documents see each other."""
    starts = range(0, 11 * len(DOCUMENTS), 11)
    rows = [torch.arange(length, device="cuda") + start for length, start in zip(DOCUMENTS, starts, strict=True)]
    tokens = torch.cat(rows).remainder(VOCABULARY).unsqueeze(0)
    positions = torch.cat([torch.arange(length, device="cuda") for length in DOCUMENTS]).unsqueeze(0)
    return {"tokens": tokens, "positions": positions, "labels": (tokens * 3 + 1).remainder(VOCABULARY)}


def forward(model: torch.nn.Module, packed: bool = True) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = micro_batch()
    bounds = torch.tensor([0, *DOCUMENTS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(DOCUMENTS), max_seqlen_kv=max(DOCUMENTS))
    allowed = torch.block_diag(*(torch.ones(length, length) for length in DOCUMENTS)).tril().bool()
    return model(
        batch["tokens"],
        batch["positions"],
        None if packed else ~allowed[None, None],
        labels=batch["labels"],
        packed_seq_params=packing if packed else None,
    )


def compare_packed_with_masked(model: torch.nn.Module) -> dict:
    """Loss and gradients of each parameter, both ways, before any step."""
    result = {}
    for name, packed in (("packed", True), ("masked", False)):
        model.zero_grad_buffer()
        loss = forward(model, packed).mean()
        loss.backward()
        result[f"{name} loss"] = loss.item()
        result[f"{name} gradients"] = [parameter.main_grad.norm().item() for parameter in model.parameters()]
    return result


def train(model: torch.nn.Module) -> list[float]:
    """The mean loss of each iteration; empty on ranks without the last stage."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0), [model])
    model.config.finalize_model_grads_func = finalize_model_grads
    losses = []
    for _ in range(ITERATIONS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
        successful, _, _ = optimizer.step()
        assert successful
        if outputs:
            losses.append(sum(output["loss"] for output in outputs) / len(outputs))
    return losses


def norms(model: torch.nn.Module) -> dict[str, list[float]]:
    """The sum of each norm's weights on every rank."""
    sums = [weight.sum().item() for name, weight in model.named_parameters() if "layernorm" in name]
    per_rank: list[list[float]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(per_rank, sums)
    return {f"norms of rank {rank}": sums for rank, sums in enumerate(per_rank)}


def forward_step(_data: None, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    return forward(model), mean_loss


def mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = token_losses.mean()
    return loss, {"loss": loss.item()}


if __name__ == "__main__":
    main()
