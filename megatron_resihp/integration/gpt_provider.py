# SPDX-License-Identifier: Apache-2.0
"""A GPT from Megatron's arguments, for scripts/pretrain_gpt.py on releases whose package has no builder of GPTs.

May import megatron.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args


def provide_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """One chunk of the model; Megatron's get_model calls it."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=_layers(args, config, vp_stage),
        mtp_block_spec=_predictors(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def _layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config=config, vp_stage=vp_stage)
    if args.heterogeneous_layers_config_path is not None:
        return get_gpt_heterogeneous_layer_spec(config, _uses_te(args))
    return get_gpt_decoder_block_spec(config, _uses_te(args), args.normalization, args.qk_l2_norm, vp_stage)


def _predictors(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Of further tokens: layers as the model's last one."""
    if args.mtp_num_layers is None:
        return None
    *_, last = get_gpt_decoder_layer_specs(config, _uses_te(args), args.normalization, args.qk_l2_norm)
    return get_gpt_mtp_block_spec(config, last, _uses_te(args), vp_stage)


def _uses_te(args: Any) -> bool:
    return bool(args.transformer_impl == "transformer_engine")
