# SPDX-License-Identifier: Apache-2.0
"""What only GPUs compute, and what only the recipe's own machine has: kernels, data, tokenizers, directories.

Imports the standard library only.
"""

from typing import Final

from recipe_runs.shrinking.draft import Draft

RUN: Final = "{run}"
"""Stands for the run's own directory."""
DOCUMENTS: Final = f"{RUN}/../documents"
"""Prefix of a data set for all runs; no other data can be cut for filling in."""

MISSING: Final = {
    "fp8's numbers": ("--fp8", "--first-last-layers-bf16", "--fp4"),
    "the three kinds of FSDP": (
        "--use-megatron-fsdp", "--use-torch-fsdp2", "--data-parallel-sharding-strategy", "--megatron-fsdp",
        "--outer-dp-sharding-strategy", "--init-model-with-meta-device", "--fsdp", "--use-nccl-ub",
    ),
    "blocks that assert Transformer Engine": (
        "--dsa-", "--fine-grained-activation-offloading", "--offload-modules",
    ),
    "a teacher of another library": ("--export-",),
}  # fmt: skip
"""Why a recipe is not run: beginnings of flags."""

KERNEL_FLAGS: Final = (
    "--use-flash-attn", "--moe-permute-fusion", "--moe-router-fusion",
    "--use-transformer-engine-op-fuser", "--te-rng-tracker", "--tp-comm-overlap",
    "--cuda-graph-", "--delay-wgrad-compute", "--moe-flex-dispatcher-backend",
    "--export-force-local-attention",
)  # fmt: skip
"""Beginnings of flags that choose a kernel and nothing else."""

DATA_FLAGS: Final = (
    "--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path",
    "--data-args-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--tiktoken-", "--tokenizer-metadata",
)  # fmt: skip
DIRECTORIES: Final = ("--save", "--load", "--tensorboard-dir", "--wandb-save-dir", "--data-cache-path")
TEXTS: Final = {"--seed": "1234", "--wandb-project": "recipes", "--wandb-entity": "", "--wandb-exp-name": "recipe"}
SAME: Final = {"--save": "checkpoints", "--load": "checkpoints"}
"""A recipe's first run starts in an empty directory, and loads from where it saves."""


def replace_devices(draft: Draft) -> None:
    _lose(draft)
    _replace_kernels(draft)
    _replace_writer(draft)
    _replace_data(draft)
    _replace_places(draft)


def _lose(draft: Draft) -> None:
    for why, beginnings in MISSING.items():
        found = draft.drop(*draft.beginning(*beginnings))
        if found:
            draft.lost.append(f"{why}: {' '.join(found)}")
    if draft.text("--ckpt-format") == "fsdp_dtensor":
        draft.set("--ckpt-format", "torch_dist")


def _replace_kernels(draft: Draft) -> None:
    def use(flag: str, value: str) -> None:
        if draft.has(flag) and draft.text(flag) != value:
            draft.kernels.append(f"{flag} {draft.text(flag)} -> {value}")
            draft.set(flag, *value.split())

    if draft.has("--reset-attention-mask") and draft.text("--transformer-impl", "transformer_engine") != "local":
        draft.kernels.append("--reset-attention-mask -> none: Transformer Engine's causal attention reads no mask")
        draft.drop("--reset-attention-mask")
    use("--transformer-impl", "local")
    use("--attention-backend", "unfused")
    use("--cross-entropy-fusion-impl", "native")
    if draft.text("--moe-token-dispatcher-type") == "flex":
        use("--moe-token-dispatcher-type", "alltoall")
    modules = draft.text("--recompute-modules").strip("[]").split()
    if draft.has("--moe-grouped-gemm") and "moe_act" in modules:
        # Megatron recomputes it for grouped experts only, and wants another module named in its place.
        use("--recompute-modules", " ".join(name for name in modules if name != "moe_act") or "mlp")
    if draft.text("--experimental-attention-variant") == "gated_delta_net" and not draft.has("--deterministic-mode"):
        draft.kernels.append("the rule of Flash Linear Attention -> Megatron's own in torch")
    for flag in draft.beginning(*KERNEL_FLAGS):
        draft.kernels.append(f"{flag} {draft.text(flag)}".rstrip() + " -> Megatron's own")
        draft.drop(flag)
    if draft.has("--moe-grouped-gemm"):
        draft.kernels.append("--moe-grouped-gemm -> experts one after another")
    draft.set("--transformer-impl", "local")
    draft.set("--no-rope-fusion")


def _replace_writer(draft: Draft) -> None:
    """Megatron's default writer beside training needs a package that few machines can install."""
    if draft.has("--async-save") and draft.text("--async-strategy", "nvrx") == "nvrx":
        draft.replaced.append("--async-strategy nvrx -> mcore")
        draft.set("--async-strategy", "mcore")
        draft.drop("--async-ckpt-use-cpu-shm")


def _replace_data(draft: Draft) -> None:
    dropped = draft.drop(*draft.beginning(*DATA_FLAGS))
    if draft.has("--fim-data"):
        draft.replaced.append("data -> documents of letters, cut by their index in stock Megatron, too")
        draft.set("--data-path", DOCUMENTS)
    elif dropped or not draft.has("--mock-data"):
        draft.replaced.append("data -> --mock-data")
        draft.set("--mock-data")
    if draft.text("--tokenizer-type") != "NullTokenizer":
        draft.replaced.append(f"tokenizer {draft.text('--tokenizer-type')}".rstrip() + " -> NullTokenizer")
    draft.set("--tokenizer-type", "NullTokenizer")
    draft.set("--split", draft.text("--split", "98,1,1").strip("'"))
    draft.set("--num-workers", 0)


def _replace_places(draft: Draft) -> None:
    for flag in DIRECTORIES:
        draft.change(flag, f"{RUN}/{SAME.get(flag, flag.removeprefix('--'))}")
    for flag, value in TEXTS.items():
        if "$" in draft.text(flag):
            draft.set(flag, value)
    # Stock Megatron draws other numbers than the plugin, and so do other degrees of tensor parallelism.
    if any(draft.real(flag, 0.1) for flag in ("--attention-dropout", "--hidden-dropout")):
        draft.replaced.append("dropout -> 0")
    draft.set("--attention-dropout", 0.0)
    draft.set("--hidden-dropout", 0.0)
    for flag in draft.beginning("--moe-input-jitter-eps", "--moe-router-force-load-balancing"):
        draft.replaced.append(f"{flag} -> none")
        draft.drop(flag)
    # So that a degree of tensor parallelism does not change what training starts from.
    draft.set("--use-cpu-initialization")
