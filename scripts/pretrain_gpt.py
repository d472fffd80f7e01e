#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with Megatron, for users without a Megatron-LM checkout and for this project's tests.

Takes Megatron's own flags and the --resihp* flags; data are --data-path, one data set per split, or --mock-data, with
--dataloader-inter-document-masking or --fim-data if wanted. Not for fine-tuning, distillation or hybrid models:
Megatron-LM's own scripts do those, and the plugin works with them too.

Imports megatron.core, megatron.training and, before them, megatron_resihp.
"""

import megatron_resihp

megatron_resihp.enable()

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import argument_utils, get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_resihp.integration import releases

Batch = dict[str, Any]
LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# Possible fields of a micro-batch; Megatron looks all of them up, present or not.
BATCH_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
)
# Dataset settings whose flags have other names; the flags of all other settings have the settings' names.
DATASET_FIELD_FLAGS = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "inter_document_masking": "dataloader_inter_document_masking",
}
FIM_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


# ---- data


def reads_data(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Whether this pipeline stage reads micro-batches."""
    return (
        # Packed documents: attention in every stage needs their bounds.
        are_packed() or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(config, vp_stage)
    )


def are_packed() -> bool:
    """Whether samples are packed documents; not every Megatron has the flag."""
    return getattr(get_args(), "dataloader_inter_document_masking", False)


def has_mtp(config: TransformerConfig, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        config.pipeline_model_parallel_layout, config.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def dataset_config() -> GPTDatasetConfig:
    args = get_args()
    config_class = GPTFIMDatasetConfig if args.fim_data else GPTDatasetConfig
    names = [field.name for field in fields(config_class) if field.init]
    flags = {name: DATASET_FIELD_FLAGS.get(name, name) for name in names}
    settings = {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}
    if args.fim_data:
        settings["fim_extra_tokens"] = {name: getattr(args, f"fim_{name}_token") for name in FIM_TOKENS}
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return config_class(**settings | {"blend": blend, "blend_per_split": blend_per_split, "tokenizer": get_tokenizer()})


def dataset_class() -> type[GPTDataset]:
    args = get_args()
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def datasets_provider(sample_counts: Sequence[int], vp_stage: int | None = None) -> list[Any]:
    """The training, validation and test data sets."""
    args = get_args()

    def is_built_here() -> bool:
        config = core_transformer_config_from_args(args)
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_data(config, vp_stage)

    return BlendedMegatronDatasetBuilder(dataset_class(), sample_counts, is_built_here, dataset_config()).build()


# Asks Megatron to call the provider on every rank, not just on one per tensor-parallel group.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def to_device(sample: Batch) -> Batch:
    """All known fields, None where the data set lacks one, and all other fields of the data set.

    In place, as in Megatron-LM's own script; later code removes unneeded fields from the same object.
    """
    for name in BATCH_FIELDS:
        value = sample.get(name)
        sample[name] = None if value is None else value.cuda(non_blocking=True)
    return sample


def next_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """This rank's part of the next micro-batch; fields that its stage does not need are None or missing."""
    args = get_args()
    # Made for each micro-batch, as in Megatron-LM's own script, so the arguments must be those of this stage.
    config = core_transformer_config_from_args(args)
    if not reads_data(config, vp_stage):
        return {}
    packed = are_packed()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        assert data_iterator is not None, "the data set was not built on this rank"
        batch = to_device(next(data_iterator))
    batch = get_batch_on_this_tp_rank(
        batch,
        packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=mpu.get_context_parallel_world_size(),
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(config, vp_stage),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    balancing = {}
    if packed:
        batch = utils.flatten_batch_for_packed_sequences(batch)
        balancing = {"use_per_sequence_balancing": True}
    cut = {name: batch[name] for name in BATCH_FIELDS}
    return batch | get_batch_on_this_cp_rank(
        cut, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group(), **balancing
    )


def packing(batch: Batch) -> PackedSeqParams | None:
    """The bounds of the documents in a packed micro-batch, so that attention stays inside each document."""
    if batch.get("cu_seqlens") is None:
        return None
    cu_seqlens = batch["cu_seqlens"].squeeze(0)
    longest = int(batch["max_seqlen"].item())
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


# ---- training


def reject_non_finite(loss: torch.Tensor) -> None:
    """Stop training on a NaN or infinite loss; Megatron's rerun machinery decides how."""
    for test, word in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=test, message=f"{word} in the loss of a micro-batch", tolerance=0.0, fatal=True
        )


def masked_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> LossResult:
    """Sum of the unmasked token losses, their count, and both as Megatron logs them."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    token_count = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        reject_non_finite(loss)
    logged = torch.cat([loss.detach().view(1), token_count.view(1)])
    return loss, token_count, {"lm loss": logged}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], LossResult]]:
    """Run one micro-batch through this rank's stage; Megatron calls the returned loss on the last stage only.

    Where experts' communication is overlapped, the stage is not run, but taken apart for Megatron's schedule.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed_seq_params = packing(batch)
    timers("batch-generator").stop()
    loss_mask: Any = batch.get("loss_mask")
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=loss_mask,
        packed_seq_params=packed_seq_params,
    )
    return output, partial(masked_loss, loss_mask)


def embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that hold a copy of the word embeddings and must add up their gradients."""
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


def check_supported(args: Namespace) -> None:
    packed_across_stages = are_packed() and args.pipeline_model_parallel_size > 1
    if packed_across_stages and args.micro_batch_size > 1:
        # Megatron packs a micro-batch into one row, yet its pipeline expects one row per sample.
        sys.exit("--dataloader-inter-document-masking across pipeline stages needs --micro-batch-size 1")


def model_description(args: Namespace) -> tuple[Any, Callable[..., Any] | None]:
    """The model's configuration, or a function that builds it where this Megatron takes no configuration."""
    if releases.current().configures_models:
        return argument_utils.gpt_config_from_args(args), None
    # Not every Megatron has all that it imports.
    from megatron_resihp.integration.gpt_provider import provide_gpt

    return None, provide_gpt


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    check_supported(args)
    config, provider = model_description(args)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, config),
        train_valid_test_dataset_provider=datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=provider,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
