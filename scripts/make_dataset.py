#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn text files, JSONL or Python sources into Megatron's indexed data set: PREFIX.bin and PREFIX.idx.

    scripts/make_dataset.py PREFIX 'books/*.txt'             one document per file
    scripts/make_dataset.py PREFIX corpus.jsonl              one document per line, its text under "text"
    scripts/make_dataset.py PREFIX --python-source           one document per function or class of the standard library

Every document ends with one end-of-document token. Without --tokenizer a token is a byte and end-of-document is 256, so
that no vocabulary file is needed; the summary names the Megatron flags that fit the data. Same input, same output.

Imports the standard library and numpy; `tokenizers` and megatron.core only once the arguments have proved good.
"""

import argparse
import ast
import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

BYTE_EOD = 256
BYTE_VOCAB_SIZE = 257
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# The standard library's tests are left out: many distributions ship none, and the corpus should be the same anywhere.
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# End-of-document tokens of published tokenizers, tried in this order.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
HISTOGRAM_EDGES = (100, 1_000, 10_000, 100_000)


class DatasetError(Exception):
    """An input or output that cannot be used. The message is one line: the cause, then how to mend it."""


class Document(NamedTuple):
    name: str
    text: bytes


@dataclass(frozen=True)
class Tokenization:
    """A mapping from text to token ids, and Megatron's flags for it."""

    encode: Callable[[bytes], np.ndarray]
    vocab_size: int
    eod: int

    def megatron_flags(self) -> str:
        flags = f"--tokenizer-type NullTokenizer --vocab-size {self.vocab_size}"
        eod_is_implied = self.eod == self.vocab_size - 1
        return flags if eod_is_implied else f"{flags} --null-tokenizer-eod-id {self.eod}"


# ---- reading documents


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {path} ({error.strerror}); fix it or leave it out of the inputs") from error


def expand_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that the paths and globs name, each once, in sorted order per pattern."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if os.path.isdir(pattern):
            raise DatasetError(f"{pattern} is a directory; name its files with a glob such as '{pattern}/**/*.txt'")
        if not matches:
            raise DatasetError(f"no file matches {pattern!r}; check the path (the working directory is {os.getcwd()})")
        files.update((Path(match), None) for match in matches if not os.path.isdir(match))
    return list(files)


def jsonl_documents(path: Path, key: str) -> Iterator[Document]:
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{where} is not JSON ({error}); write one JSON object per line") from error
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DatasetError(f"{where} has no text under {key!r}; name the right key with --json-key")
        yield Document(where, text.encode("utf-8", errors="surrogatepass"))


def file_documents(paths: Iterable[Path], json_key: str | None) -> Iterator[Document]:
    for path in paths:
        if json_key is not None or path.suffix in JSONL_SUFFIXES:
            yield from jsonl_documents(path, json_key or "text")
        else:
            yield Document(str(path), read_bytes(path))


def python_files(root: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DatasetError(f"Python source {root} does not exist; name a .py file or a directory of them")
    found = (path for path in root.rglob("*.py") if excluded.isdisjoint(path.relative_to(root).parts))
    files = sorted(found, key=lambda path: path.relative_to(root).parts)
    if not files:
        raise DatasetError(f"Python source {root} holds no .py file; name another directory with --python-source")
    return files


def definitions(source: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and text, decorators included, of each top-level function and class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes and literals in other people's sources
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, b"".join(lines[first - 1 : node.end_lineno])


def python_documents(root: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Document]:
    for path in python_files(root, excluded):
        source = read_bytes(path)
        relative = path.name if root.is_file() else path.relative_to(root).as_posix()
        try:
            for name, text in definitions(source):
                yield Document(f"{relative}:{name}", text)
        except (SyntaxError, ValueError) as error:
            print(f"make_dataset.py: left out {path}, which does not parse ({error})", file=sys.stderr)


def stdlib_documents() -> Iterator[Document]:
    return python_documents(Path(sysconfig.get_path("stdlib")), STDLIB_EXCLUDED)


def source_documents(args: argparse.Namespace) -> Iterator[Document]:
    if args.inputs:
        yield from file_documents(expand_inputs(args.inputs), args.json_key)
    if args.python_source is not None:
        for root in args.python_source:
            yield from python_documents(Path(root))
        if not args.python_source:
            yield from stdlib_documents()


def cap(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Whole documents of at most `max_bytes` in all, in their old order.

    They are drawn by a hash of their names, so that a capped corpus has the lengths of the whole one and not those of
    the alphabetically first files.
    """
    drawn = sorted(
        range(len(documents)), key=lambda index: (hashlib.sha256(documents[index].name.encode()).digest(), index)
    )
    kept: list[int] = []
    room = max_bytes
    for index in drawn:
        if len(documents[index].text) <= room:
            room -= len(documents[index].text)
            kept.append(index)
    return [documents[index] for index in sorted(kept)]


def collect_documents(args: argparse.Namespace) -> list[Document]:
    documents = [document for document in source_documents(args) if document.text]
    if not documents:
        raise DatasetError("the inputs hold no text; name files that are not empty")
    if args.max_bytes is None:
        return documents
    capped = cap(documents, args.max_bytes)
    if not capped:
        raise DatasetError(f"no document fits into --max-bytes {args.max_bytes}; raise it")
    return capped


# ---- tokens


def encode_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def byte_tokenization() -> Tokenization:
    return Tokenization(encode_bytes, BYTE_VOCAB_SIZE, BYTE_EOD)


def file_tokenization(path: str, eod_token: str | None) -> Tokenization:
    """The tokenizer of a Hugging Face `tokenizer.json`."""
    if not os.path.isfile(path):
        raise DatasetError(f"tokenizer file {path} does not exist; name a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DatasetError("--tokenizer needs the package 'tokenizers'; pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise DatasetError(f"{path} is not a tokenizer file ({error}); name a tokenizer.json") from error
    names = EOD_NAMES if eod_token is None else (eod_token,)
    eod = next((token for token in map(tokenizer.token_to_id, names) if token is not None), None)
    if eod is None:
        raise DatasetError(f"{path} has no token {' or '.join(names)}; name its end of document with --eod-token")

    def encode(text: bytes) -> np.ndarray:
        encoding = tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)

    return Tokenization(encode, tokenizer.get_vocab_size(with_added_tokens=True), eod)


# ---- writing


def parts(prefix: str) -> tuple[Path, Path]:
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def check_output(prefix: str, overwrite: bool) -> None:
    existing = [str(path) for path in parts(prefix) if path.exists()]
    if existing and not overwrite:
        raise DatasetError(f"{' and '.join(existing)} exist already; pass --overwrite or name another prefix")
    directory = Path(prefix).parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = Path(f"{prefix}.bin.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DatasetError(
            f"cannot write to {directory} ({error.strerror}); name another PREFIX or fix its permissions"
        ) from error


@contextmanager
def written_aside(prefix: str) -> Iterator[tuple[Path, Path]]:
    """Two paths to write to, moved into place together on success: a reader never finds half a data set."""
    targets = parts(prefix)
    bin_part, idx_part = (Path(f"{path}.part") for path in targets)
    try:
        yield bin_part, idx_part
        # Megatron caches its sample index beside the data, under a key that does not depend on their content.
        shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)
        for part, target in zip((bin_part, idx_part), targets, strict=True):
            part.replace(target)
    finally:
        for part in (bin_part, idx_part):
            part.unlink(missing_ok=True)


def write_dataset(prefix: str, documents: Iterable[Document], tokenization: Tokenization) -> np.ndarray:
    """Write PREFIX.bin and PREFIX.idx; return the documents' lengths in tokens, end-of-document included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU libraries, which a data set does not need
        try:
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        except ImportError as error:
            raise DatasetError(
                f"{sys.executable} cannot import megatron-core ({error}); run this with .venv/bin/python"
            ) from error

    lengths: list[int] = []
    with written_aside(prefix) as (bin_path, idx_path):
        builder = IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(tokenization.vocab_size))
        for document in documents:
            tokens = np.append(tokenization.encode(document.text), tokenization.eod)
            builder.add_document(tokens, [len(tokens)])
            lengths.append(len(tokens))
        builder.finalize(str(idx_path))
    return np.asarray(lengths)


# ---- summary and command line


def histogram(lengths: np.ndarray, width: int = 40) -> list[str]:
    edges = (0, *HISTOGRAM_EDGES, np.iinfo(np.int64).max)
    counts = np.histogram(lengths, bins=edges)[0]
    labels = [f"< {HISTOGRAM_EDGES[0]:,}", *(f">= {edge:,}" for edge in HISTOGRAM_EDGES)]
    bars = ["#" * int(np.ceil(width * count / counts.max())) for count in counts]
    return [f"{label:>12} {count:9,} {bar}".rstrip() for label, count, bar in zip(labels, counts, bars, strict=True)]


def summary(prefix: str, lengths: np.ndarray, tokenization: Tokenization) -> str:
    median, p99 = np.percentile(lengths, [50, 99])
    return "\n".join(
        [
            f"{prefix}.bin, {prefix}.idx",
            f"documents {len(lengths):,}, tokens {lengths.sum():,}, "
            f"vocabulary {tokenization.vocab_size:,}, end of document {tokenization.eod}",
            f"tokens per document: min {lengths.min():,}, median {median:,.0f}, p99 {p99:,.0f}, max {lengths.max():,}",
            *histogram(lengths),
            f"train with: --data-path {prefix} {tokenization.megatron_flags()}",
        ]
    )


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="make_dataset.py",
        description=__doc__.partition("\n\n")[0],
        epilog="Exit code 2 means unusable input or output.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help="where to write: PREFIX.bin and PREFIX.idx")
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help="text files, .jsonl files, or quoted globs (** too)")
    parser.add_argument("--json-key", metavar="KEY", help="read every INPUT as JSONL with its text under KEY")
    parser.add_argument(
        "--python-source",
        metavar="PATH",
        nargs="*",
        help="a document per top-level function and class of these; of the standard library if no PATH is given",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json; default: bytes")
    parser.add_argument("--eod-token", help=f"end of document in FILE; default: the first of {', '.join(EOD_NAMES)}")
    parser.add_argument("--max-bytes", type=positive, help="keep whole documents up to this many bytes, evenly drawn")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing data set and its index cache")
    args = parser.parse_args(argv)
    if not args.inputs and args.python_source is None:
        parser.error("no input: name files or pass --python-source")
    if args.eod_token is not None and args.tokenizer is None:
        parser.error("--eod-token needs --tokenizer")
    return args


def make_dataset(args: argparse.Namespace) -> str:
    check_output(args.prefix, args.overwrite)
    if args.tokenizer is None:
        tokenization = byte_tokenization()
    else:
        tokenization = file_tokenization(args.tokenizer, args.eod_token)
    lengths = write_dataset(args.prefix, collect_documents(args), tokenization)
    return summary(args.prefix, lengths, tokenization)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        print(make_dataset(args))
    except DatasetError as error:
        print(f"make_dataset.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_dataset.py: writing {args.prefix} failed ({error}); fix that and run it again", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
