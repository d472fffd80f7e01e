# SPDX-License-Identifier: Apache-2.0
"""What to say of flags and words that Megatron's parser does not take. Imports the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

FORMER: Final[Mapping[str, str]] = {
    "--DDP-impl": "leave it out: Megatron has only one now",
    "--async-tensor-model-parallel-allreduce": "leave it out: Megatron always overlaps this sum",
    "--checkpoint-num-layers": "give --recompute-num-layers",
    "--data-impl": "leave it out: Megatron has only one now",
    "--enable-gloo-process-groups": "leave it out: they are there without --disable-gloo-process-groups",
    "--fp8-e4m3": "give --fp8-format e4m3",
    "--fp8-hybrid": "give --fp8-format hybrid",
    "--hybrid-attention-ratio": "leave it out: --hybrid-layer-pattern says where these layers are",
    "--hybrid-mlp-ratio": "leave it out: --hybrid-layer-pattern says where these layers are",
    "--legacy-tokenizer": "leave it out: Megatron has only one kind of tokenizers now",
    "--log-batch-size-to-tensorboard": "leave it out: Megatron always logs it",
    "--moe-extended-tp": "give --expert-tensor-parallel-size",
    "--moe-use-legacy-grouped-gemm": "leave it out: --moe-grouped-gemm has only one implementation now",
    "--no-async-tensor-model-parallel-allreduce": "leave it out: Megatron always overlaps this sum",
    "--no-query-key-layer-scaling": "leave it out: nothing is scaled without --apply-query-key-layer-scaling",
    "--use-contiguous-parameters-in-local-ddp": "leave it out: Megatron's are always contiguous",
    "--use-custom-fsdp": "it is --use-megatron-fsdp now, which --resihp refuses: use --use-distributed-optimizer",
    "--use-legacy-models": "leave it out: Megatron has no such models any more",
    "--wandb-name": "give --wandb-exp-name",
}
"""Flags that Megatron had once, or that many scripts of forks give, and what to do now."""
OF_A_FORK: Final = "a fork's flag? leave it out only if the model does not need it"
WORD: Final = 5
"""Letters of a word in which one that is mistyped is still known. Shorter ones are often words of their own."""
LIKENESS: Final = 0.75


def explained(flag: str, known: Iterable[str], commands: Mapping[str, str]) -> str:
    """The flag, with what may be wrong with it.

    Args:
        known: Megatron's flags and the script's.
        commands: our commands' own options, and whose they are.
    """
    if flag in FORMER:
        return f"{flag} ({FORMER[flag]})"
    if flag in commands:
        return f"{flag} (an option of {commands[flag]}: put it before the script)"
    near = _meant(flag, known)
    return f"{flag} (do you mean {near}?)" if near else flag


def refusal(flag: str, known: Iterable[str], commands: Mapping[str, str]) -> str:
    """The same of a flag that the script does not define either, "cause; mend"."""
    if flag in commands:
        return f"{flag} is an option of {commands[flag]}; put it before the script"
    if flag in FORMER:
        mend = FORMER[flag]
    else:
        near = _meant(flag, known)
        mend = f"do you mean {near}?" if near else OF_A_FORK
    return f"{flag}: neither Megatron nor the script has this flag; {mend}"


def of_words(flag: str, words: Sequence[str]) -> str:
    """What to say of words that no flag takes. `flag`: the one before them, or an empty string."""
    if not any(words):
        place = f"after {flag}" if flag else "before the first flag"
        return f"an empty word {place}, which no flag takes: an unset shell variable?"
    what = "this word" if len(words) == 1 else "these words"
    value = f"if the value of {flag} has spaces, quote it; otherwise " if flag else ""
    return f"{' '.join(words)}: no flag takes {what}; {value}leave out `{' '.join(words)}`"


def _meant(flag: str, known: Iterable[str]) -> str | None:
    """The known flag that differs only in how it is divided into words, or in one long word by little."""
    words = _words(flag)
    for other in known:
        others = _words(other)
        if "".join(words) == "".join(others):
            return other
        if len(words) != len(others):
            continue
        differing = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
        if len(differing) == 1 and min(map(len, differing[0])) >= WORD and _alike(*differing[0]):
            return other
    return None


def _words(flag: str) -> list[str]:
    return flag.lstrip("-").replace("_", "-").split("-")


def _alike(word: str, other: str) -> bool:
    return bool(get_close_matches(word, [other], 1, LIKENESS))
