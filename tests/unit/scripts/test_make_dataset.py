# SPDX-License-Identifier: Apache-2.0
"""scripts/make_dataset.py: what becomes a document, what Megatron reads back, and what bad input says."""

from __future__ import annotations

import errno
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

PYTHON_SOURCE = b'''"""Module text is no document."""
import functools

CONSTANT = 1


def first():
    return "caf\xc3\xa9"


@functools.cache
@functools.wraps(first)
async def decorated(
    argument,
):
    def inner():
        pass


class Whole(dict):
    def method(self):
        """Part of its class."""
'''
DOCUMENTS = [
    b'def first():\n    return "caf\xc3\xa9"\n',
    b"@functools.cache\n@functools.wraps(first)\n"
    b"async def decorated(\n    argument,\n):\n    def inner():\n        pass\n",
    b'class Whole(dict):\n    def method(self):\n        """Part of its class."""\n',
]


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_dataset")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two modules, one of them in a directory that the standard library's corpus would leave out."""
    root = tmp_path / "sources"
    (root / "test").mkdir(parents=True)
    (root / "module.py").write_bytes(PYTHON_SOURCE)
    (root / "test" / "other.py").write_bytes(b"def tested(): pass\n")
    return root


def read_back(prefix: Path) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1)), "one sequence per document"
    return [np.array(sequence) for sequence in dataset]


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def expect_error(script: ModuleType, capsys: pytest.CaptureFixture[str], argv: Sequence[str], *words: str) -> None:
    """Exit code 2 and one line on stderr that holds all the words."""
    try:
        code = script.main(argv)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("make_dataset.py: ")
    for word in words:
        assert word in captured.err


# ---- documents


def test_a_document_is_a_top_level_function_or_class_with_its_decorators(script: ModuleType) -> None:
    assert list(script.definitions(PYTHON_SOURCE)) == list(zip(["first", "decorated", "Whole"], DOCUMENTS, strict=True))


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_line_ends_do_not_shift_documents(script: ModuleType, newline: bytes) -> None:
    source = b"text = '''\x0c\x0b'''\n\x0cdef f():\n    pass\n\ndef g(): pass".replace(b"\n", newline)
    texts = [text for _, text in script.definitions(source)]
    assert texts == [b"\x0cdef f():\n    pass\n".replace(b"\n", newline), b"def g(): pass"]


def test_python_sources_come_in_path_order_and_tests_can_be_excluded(script: ModuleType, sources: Path) -> None:
    names = [document.name for document in script.python_documents(sources)]
    assert names == ["module.py:first", "module.py:decorated", "module.py:Whole", "test/other.py:tested"]
    names = [document.name for document in script.python_documents(sources, script.STDLIB_EXCLUDED)]
    assert names == ["module.py:first", "module.py:decorated", "module.py:Whole"]


def test_a_module_that_does_not_parse_is_left_out_and_named(
    script: ModuleType, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "broken.py").write_text("def f(:")
    assert len(list(script.python_documents(sources))) == 4
    assert "broken.py" in capsys.readouterr().err


def test_the_standard_library_has_documents_from_tiny_to_huge(script: ModuleType) -> None:
    source = Path(sysconfig.get_path("stdlib"), "_pydecimal.py").read_bytes()
    assert max(len(text) for _, text in script.definitions(source)) > 100_000
    source = Path(sysconfig.get_path("stdlib"), "_collections_abc.py").read_bytes()
    assert min(len(text) for _, text in script.definitions(source)) < 100


# ---- round trip


@given(text=st.binary())
def test_bytes_are_tokens(script: ModuleType, text: bytes) -> None:
    assert script.encode_bytes(text).tolist() == list(text)


def test_text_files_read_back_as_bytes_ending_in_eod(script: ModuleType, tmp_path: Path) -> None:
    texts = [b"one", bytes(range(256)), "drei ☃\n".encode()]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    (tmp_path / "3.txt").touch()  # an empty file is no document
    prefix = tmp_path / "new" / "corpus"
    assert script.main([str(prefix), str(tmp_path / "*.txt")]) == 0
    assert [tokens.tolist() for tokens in read_back(prefix)] == [[*text, 256] for text in texts]
    assert read_back(prefix)[0].dtype == np.uint16


def test_jsonl_has_a_document_per_line(script: ModuleType, tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one", "body": "1"}), "", json.dumps({"text": "zwei ü", "body": "2"})]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    assert script.main([str(tmp_path / "a"), str(tmp_path / "corpus.jsonl")]) == 0
    assert [bytes(tokens[:-1].tolist()).decode() for tokens in read_back(tmp_path / "a")] == ["one", "zwei ü"]
    assert script.main([str(tmp_path / "b"), str(tmp_path / "corpus.txt"), "--json-key", "body"]) == 0
    assert [bytes(tokens[:-1].tolist()).decode() for tokens in read_back(tmp_path / "b")] == ["1", "2"]


def test_same_input_same_output(script: ModuleType, sources: Path, tmp_path: Path) -> None:
    argv = ["--python-source", str(sources), "--max-bytes", "100"]
    assert script.main([str(tmp_path / "a"), *argv]) == 0
    assert script.main([str(tmp_path / "b"), *argv]) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=30),
    max_bytes=st.integers(min_value=1, max_value=500),
)
def test_a_cap_keeps_whole_documents_in_order_and_leaves_no_room_for_another(
    script: ModuleType, sizes: list[int], max_bytes: int
) -> None:
    documents = [script.Document(f"document {number}", b"x" * size) for number, size in enumerate(sizes)]
    kept = script.cap(documents, max_bytes)
    assert kept == [document for document in documents if document in kept]
    room = max_bytes - sum(len(document.text) for document in kept)
    assert room >= 0
    assert all(len(document.text) > room for document in documents if document not in kept)


def test_the_summary_fits_a_screen_and_names_the_flags(
    script: ModuleType, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path / "a"), "--python-source", str(sources)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines[1:-1])) <= 100
    assert "documents 4, " in lines[1]
    assert lines[-1].endswith("--tokenizer-type NullTokenizer --vocab-size 257")


@pytest.mark.since_megatron("0.19")
def test_megatron_sees_the_document_bounds_and_the_eod_of_the_summary_flags(
    script: ModuleType, sources: Path, tmp_path: Path
) -> None:
    """With the flags that the summary prints, cu_seqlens of a sample are where its documents end."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    prefix = tmp_path / "corpus"
    assert script.main([str(prefix), "--python-source", str(sources)]) == 0
    flags = SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=257, pad_vocab_size=False)
    tokenizer = build_tokenizer(flags)
    assert tokenizer.eod == script.BYTE_EOD
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([str(prefix)], None),
        split="1",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, (8, None, None), lambda: True, config).build()[0]
    for sample in (dataset[index] for index in range(8)):
        after_eod = (np.flatnonzero(sample["tokens"] == script.BYTE_EOD) + 1).tolist()
        assert sorted({*sample["cu_seqlens"].tolist()}) == sorted({0, *after_eod, 64})


# ---- a tokenizer file


class FakeTokenizer:
    """Stands for tokenizers.Tokenizer: one id per word."""

    @staticmethod
    def from_file(path: str) -> FakeTokenizer:
        if "{" not in Path(path).read_text():
            raise Exception("expected value at line 1")
        return FakeTokenizer()

    def token_to_id(self, token: str) -> int | None:
        return {"<|endoftext|>": 7, "<stop>": 8}.get(token)

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return 100_000

    def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(ids=[70_000 + len(word) for word in text.split()])


@pytest.fixture
def tokenizer_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=FakeTokenizer))
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


@pytest.mark.parametrize(("eod_flags", "eod"), [([], 7), (["--eod-token", "<stop>"], 8)])
def test_a_tokenizer_file_gives_ids_eod_and_flags(
    script: ModuleType,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
    eod_flags: list[str],
    eod: int,
) -> None:
    (tmp_path / "a.txt").write_text("a bc def")
    argv = [str(tmp_path / "out"), str(tmp_path / "a.txt"), "--tokenizer", str(tokenizer_file), *eod_flags]
    assert script.main(argv) == 0
    assert f"--vocab-size 100000 --null-tokenizer-eod-id {eod}" in capsys.readouterr().out
    (tokens,) = read_back(tmp_path / "out")
    assert tokens.tolist() == [70_001, 70_002, 70_003, eod]


# ---- errors


def test_a_bad_tokenizer_is_one_line(
    script: ModuleType,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.txt").write_text("a")
    argv = [str(tmp_path / "out"), str(tmp_path / "a.txt")]
    tokenizer_flags = ["--tokenizer", str(tokenizer_file)]
    expect_error(script, capsys, [*argv, "--tokenizer", str(tmp_path / "none.json")], "none.json", "does not exist")
    expect_error(script, capsys, [*argv, *tokenizer_flags, "--eod-token", "<no>"], "<no>", "--eod-token")
    expect_error(script, capsys, [*argv, "--eod-token", "<no>"], "--tokenizer")
    tokenizer_file.write_text("words")
    expect_error(script, capsys, [*argv, *tokenizer_flags], "not a tokenizer file")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    expect_error(script, capsys, [*argv, *tokenizer_flags], "pip install tokenizers")


def test_bad_input_is_one_line_with_cause_and_mend(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "keyless.jsonl").write_text('{"body": "b"}\n')
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "directory").mkdir()

    def refused(arguments: Sequence[str], *words: str) -> None:
        expect_error(script, capsys, [str(tmp_path / "out"), *arguments], *words)

    refused([], "--python-source")
    refused([str(tmp_path / "*.none")], "*.none", "check the path")
    refused([str(tmp_path / "directory")], "is a directory", "glob")
    refused([str(tmp_path / "empty.txt")], "no text", "not empty")
    refused([str(tmp_path / "bad.jsonl")], "bad.jsonl:2", "not JSON")
    refused([str(tmp_path / "keyless.jsonl")], "keyless.jsonl:1", "--json-key")
    refused([str(tmp_path / "good.txt"), "--max-bytes", "1"], "--max-bytes 1", "raise it")
    refused([str(tmp_path / "good.txt"), "--max-bytes", "0"], "--max-bytes")
    refused(["--python-source", str(tmp_path / "nowhere")], "nowhere", "does not exist")
    refused(["--python-source", str(tmp_path / "directory")], "no .py file")
    assert not list(tmp_path.glob("out*")), "a refused run leaves nothing behind"


def test_an_unreadable_file_is_one_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))  # as root, chmod would not refuse

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (tmp_path / "secret.txt").write_text("secret")
    expect_error(
        script, capsys, [str(tmp_path / "out"), str(tmp_path / "secret.txt")], "cannot read", "Permission denied"
    )


def test_an_output_that_cannot_be_written_is_one_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.txt").write_text("text")
    expect_error(
        script, capsys, [str(tmp_path / "file.txt" / "out"), str(tmp_path / "file.txt")], "cannot write", "PREFIX"
    )


def test_a_data_set_is_replaced_only_on_request_and_its_index_cache_with_it(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("old")
    argv = [str(tmp_path / "out"), str(tmp_path / "a.txt")]
    assert script.main(argv) == 0
    before = contents(tmp_path / "out")
    cache = tmp_path / "out" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    (tmp_path / "a.txt").write_text("new")
    capsys.readouterr()
    expect_error(script, capsys, argv, "out.bin", "--overwrite")
    assert contents(tmp_path / "out") == before and cache.exists()
    assert script.main([*argv, "--overwrite"]) == 0
    assert contents(tmp_path / "out") != before and not cache.exists()
    assert not list(tmp_path.glob("*.part"))
