# SPDX-License-Identifier: Apache-2.0
"""What to say of flags and words that Megatron's parser does not take. Imports the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

FORMER: Final[Mapping[str, str]] = {
    "--DDP-impl": "Megatron has only one now",
    "--data-impl": "Megatron has only one now",
    "--log-batch-size-to-tensorboard": "Megatron always logs it",
    "--no-async-tensor-model-parallel-allreduce": "Megatron always overlaps this sum",
    "--no-query-key-layer-scaling": "nothing is scaled without --apply-query-key-layer-scaling",
    "--use-legacy-models": "Megatron has no such models any more",
}
"""Flags that Megatron had once, and why they can be left out."""
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
        return f"{flag} (leave it out: {FORMER[flag]})"
    if flag in commands:
        return f"{flag} (an option of {commands[flag]}: put it before the script)"
    near = _meant(flag, known)
    return f"{flag} (do you mean {near}?)" if near else flag


def refusal(flag: str, known: Iterable[str], commands: Mapping[str, str]) -> str:
    """The same of a flag that the script does not define either, "cause; mend"."""
    if flag in commands:
        return f"{flag} is an option of {commands[flag]}; put it before the script"
    if flag in FORMER:
        mend = f"leave it out: {FORMER[flag]}"
    else:
        near = _meant(flag, known)
        mend = f"do you mean {near}?" if near else "leave it out"
    return f"{flag}: neither Megatron nor the script has this flag; {mend}"


def of_words(flag: str, words: Sequence[str]) -> str:
    """What to say of words that no flag takes. `flag`: the one before them, or an empty string."""
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
