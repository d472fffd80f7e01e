# SPDX-License-Identifier: Apache-2.0
"""Widths, heads, experts, vocabulary and sequence, in the recipe's own ratios. Imports the standard library only."""

from typing import Final

from recipe_runs.shrinking.draft import Draft, nearest

HIDDEN: Final = 64
HEADS: Final = 8
MULTIPLE: Final = 16
"""Of widths that tensor parallelism cuts."""
SEQUENCE: Final = 32
VOCABULARY: Final = 127
EXPERTS, GROUPED_EXPERTS = 8, 16

HEAD_PARTS: Final = {
    "--qk-head-dim": 16, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 16, "--linear-key-head-dim": 8,
    "--linear-value-head-dim": 8,
}  # fmt: skip
"""The most that parts of a head have in latent and in linear attention."""
WIDTHS: Final = (
    "--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--q-lora-rank",
    "--kv-lora-rank", "--mup-base-hidden-size", "--moe-latent-size",
)  # fmt: skip


def shrink_sizes(draft: Draft) -> None:
    _shrink_widths(draft)
    _shrink_experts(draft)
    _shrink_sequence(draft)
    draft.set("--vocab-size", VOCABULARY)
    # The same padded vocabulary, and so the same weights, whatever the degree of tensor parallelism.
    draft.set("--make-vocab-size-divisible-by", MULTIPLE * 2)


def _shrink_widths(draft: Draft) -> None:
    hidden, heads = draft.number("--hidden-size"), draft.number("--num-attention-heads")
    fewer_heads = min(heads, HEADS)
    for flag in WIDTHS:
        draft.change(flag, nearest(draft.number(flag) * HIDDEN / hidden, MULTIPLE))
    channels = draft.number("--kv-channels") * heads / hidden * HIDDEN / fewer_heads
    draft.change("--kv-channels", nearest(channels, HIDDEN // HEADS))
    draft.change("--num-query-groups", max(draft.number("--num-query-groups") * fewer_heads // heads, 1))
    draft.change("--num-attention-heads", fewer_heads)
    draft.change("--hidden-size", HIDDEN)
    for flag, most in HEAD_PARTS.items():
        draft.change(flag, min(draft.number(flag), most))


def _shrink_experts(draft: Draft) -> None:
    """Fewer experts, in fewer groups, of which a token still goes to as large a part where that is more than one."""
    count = draft.number("--num-experts")
    groups = draft.number("--moe-router-num-groups")
    fewer = min(count, GROUPED_EXPERTS if groups > 1 else EXPERTS)
    fewer_groups = min(groups, 4)
    chosen = draft.number("--moe-router-group-topk")
    fewer_chosen = min(chosen, max(chosen * fewer_groups // groups, 2))
    best = draft.number("--moe-router-topk")
    draft.change("--num-experts", fewer)
    draft.change("--moe-router-num-groups", fewer_groups)
    draft.change("--moe-router-group-topk", fewer_chosen)
    draft.change("--moe-router-topk", min(best, max(best * fewer // count, 2), fewer_chosen * fewer // fewer_groups))


def _shrink_sequence(draft: Draft) -> None:
    sequence = draft.number("--seq-length")
    positions = draft.number("--max-position-embeddings")
    draft.change("--seq-length", SEQUENCE)
    draft.change("--max-position-embeddings", max(SEQUENCE * positions // sequence, SEQUENCE))
    if draft.has("--window-size"):
        draft.set("--window-size", "7,0")
