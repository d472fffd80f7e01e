# SPDX-License-Identifier: Apache-2.0
"""Rows: data sets, loaders and the tokenizer. Imports `notation` and `row`."""

from megatron_resihp.integration.support.notation import (
    Rows,
    at_start,
    inert,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import Together

_PACKED = "integration/test_recovery_movers.py::test_packed_documents"
_TOKENIZER = "core.tokenizers.utils.build_tokenizer:build_tokenizer"
_DATASET = "core.datasets.gpt_dataset:GPTDataset"
_BUILDER = "core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"
_ORDER = "samples would come in another order, or from places that no recovery can go back to"

_SETS: Rows = joined(
    tested(_PACKED, "data_path data_cache_path dataloader_inter_document_masking vocab_size mock_data"),
    tested("integration/test_plans.py::test_from_plan_to_plan_and_back", "split tokenizer_type"),
    at_start(
        "training.utils.common_utils:get_blend_and_blend_per_split",
        "train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path",
    ),
    at_start(_BUILDER, "num_dataset_builder_threads mid_level_dataset_surplus"),
    kernel(_DATASET, "mmap_bin_files eod_mask_loss"),
    tested(
        "integration/test_context_parallelism.py::test_positions_that_begin_anew_with_each_document",
        "reset_position_ids",
    ),
    inert(
        "core.datasets.gpt_dataset:_get_ltor_masks_and_position_ids",
        "reset_attention_mask",
        condition=Together(
            lambda values: (
                not values["reset_attention_mask"]
                or not values["create_attention_mask_in_dataloader"]
                or bool(values.get("dataloader_inter_document_masking"))  # no mask is made then; 0.18 has none
                # Transformer Engine's causal attention reads no mask.
                or values["transformer_impl"] == "transformer_engine"
            ),
            "Megatron gives the mask to the first and the last stage only, so other stages would change what its own "
            "layers see; use --dataloader-inter-document-masking, or --no-create-attention-mask-in-dataloader, with "
            "which it does nothing",
        ),
    ),
    kernel("training.arguments:validate_args", "create_attention_mask_in_dataloader"),
    tested(
        "integration/test_padding_tokens.py::test_losses_are_masked_the_same_after_a_death",
        "allow_ambiguous_pad_tokens",
    ),
    inert("training.arguments:validate_args", "encoder_seq_length"),
    refused(
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap per_dataset_sequences_path",
        "workers would trust a cache or a count that nobody compares between them",
    ),
    refused(
        "object_storage_cache_path",
        "workers meet to fetch an index, which a worker that joins later can't",
        "copy the data to a file system",
    ),
    tested("integration/test_fim.py::test_samples_are_cut_the_same_after_a_death", "fim_data fim_rate fim_spm_rate"),
    kernel(
        "training.datasets.fim_dataset:GPTFIMDataset",
        "fim_split_sample fim_fragment_rate fim_no_prefix",
    ),
    kernel(
        "training.arguments:validate_args",
        "fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token",
    ),
    refused("sft", "conversations are packed as they come, which no test covers"),
    without("sft", _TOKENIZER, "sft_tokenizer_prompt_format"),
    unread("training.arguments:_add_data_args", "mask_prob short_seq_prob sample_rate"),
)

_LOADERS: Rows = joined(
    tested("integration/test_recovery_points.py::test_data_loaders_of_a_dead_worker_die_with_it", "num_workers"),
    tested(
        "integration/test_shuffled_samples.py::test_samples_come_in_megatrons_order_through_a_death",
        "dataloader_type",
        condition=one_of(None, "single", "cyclic", mend="an external loader can't be rewound; use single or cyclic"),
    ),
    kernel(
        "training.datasets.data_samplers:MegatronPretrainingRandomSampler",
        "data_sharding",
        condition=Together(
            lambda values: values["data_sharding"] or values["dataloader_type"] != "cyclic",
            "with --dataloader-type cyclic, replicas may have unequal numbers of micro-batches in an epoch; leave it "
            "out",
        ),
    ),
)

_WORDS: Rows = joined(
    at_start(
        _TOKENIZER,
        """vocab_file merge_file tokenizer_model pad_vocab_size special_tokens tiktoken_pattern
        tiktoken_num_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id metadata_path
        tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens trust_remote_code chat_template""",
    ),
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "padded_vocab_size"),
    unread("training.config.training_config:TokenizerConfig", "vocab_extra_ids"),
)

ROWS: Rows = joined(_SETS, _LOADERS, _WORDS)
