# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data for recipes on CPUs: documents of letters, and what Megatron's data set asks of a tokenizer.

May import megatron and the plugin's own cuts, in functions that the training script calls.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

LETTERS: Final = range(ord("a"), ord("z") + 1)
END: Final = 126
"""Of a document: the last of the vocabulary that recipes shrink to, as with NullTokenizer."""
TOKENS: Final = {"<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3, "<fim_pad>": 4, "<|endoftext|>": END}
OTHER: Final = 5
"""Any other token, such as one between files."""
DOCUMENTS: Final = 4000
"""A split of one in a thousand has some, too: Megatron would count the epochs of an empty one for ever."""


class Letters:
    """A token is a character."""

    def tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        return TOKENS.get(tokens, OTHER) if isinstance(tokens, str) else [TOKENS.get(token, OTHER) for token in tokens]

    def ids_to_text(self, ids: Iterable[int], remove_special_tokens: bool = False) -> str:
        return "".join(chr(number) for number in ids if number in LETTERS or not remove_special_tokens)

    def text_to_ids(self, text: str) -> list[int]:
        return list(map(ord, text))


class LetterTokenizer:
    """Megatron's NullTokenizer with texts. `_tokenizer` is what Megatron's data set looks for."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._tokenizer = Letters()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def write_documents(prefix: Path) -> None:
    """Words of any length, the same every time."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = Random(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(DOCUMENTS):
        letters = [random.choice(LETTERS[:: random.randint(1, 5)]) for _ in range(random.randint(5, 60))]
        builder.add_document(np.array([*letters, END]), [len(letters) + 1])
    builder.finalize(f"{prefix}.idx")


def read_letters(script: Any, with_plugin: bool) -> None:
    """Let a training script read such documents, cut as the plugin cuts them, with and without it."""
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    from megatron_resihp.integration.patches.data import wrap_query_sample

    plain = script.get_tokenizer
    script.get_tokenizer = lambda: LetterTokenizer(plain())
    if not with_plugin:
        query = GPTFIMDataset._query_document_sample_shuffle_indices
        GPTFIMDataset._query_document_sample_shuffle_indices = wrap_query_sample(query)
