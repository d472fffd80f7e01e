# SPDX-License-Identifier: Apache-2.0
"""The support table against the installed Megatron, against the tests that it names, and against its page."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import megatron.core
import megatron.training
import pytest
from megatron.training import arguments

from megatron_resihp.integration import releases
from megatron_resihp.integration.support import LACKING, SUBJECTS, SUPPORTED, TABLE, Evidence, Needs, Row, refusals
from megatron_resihp.integration.support.page import markdown

ROOT = Path(__file__).resolve().parents[4]
MEGATRON = Path(megatron.training.__file__).parents[1]
RELEASE = ".".join(megatron.core.__version__.split(".")[:2])
PRESENT = tuple(row for row in TABLE.values() if row.name not in LACKING[RELEASE])
HELD = tuple(row for row in PRESENT if row.evidence is Evidence.TEST)
READ = tuple(row for row in PRESENT if row.evidence in (Evidence.INERT, Evidence.START, Evidence.KERNEL))
BESIDE_STEPS = (
    "training.checkpointing", "training.async_utils", "training.utils.common_utils", "core.tokenizers",
    "core.datasets.blended_megatron_dataset_builder", "core.parallel_state",
)  # fmt: skip
"""Modules of Megatron that compute nothing of a step."""
NO_KERNELS = frozenset(
    """seed te_rng_tracker perform_initialization init_method_std init_method_xavier_uniform train_samples
    start_eval_at_iter padded_vocab_size cp_comm_type dataloader_type override_opt_param_scheduler""".split()
)
"""Of modules that compute steps, what says how a job begins, draws, counts, cuts or communicates."""
OTHER_MODELS = ("bert", "T5", "vision", "mimo", "multimodal", "retro", "audio", "hybrid", "huggingface")
"""Of megatron.core.models, which pretraining of a GPT doesn't build."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))


def test_every_argument_of_megatron_has_a_row_and_every_row_an_argument(parser: argparse.ArgumentParser) -> None:
    known = set(vars(parser.parse_args([])))
    rows = {row.name for row in PRESENT}
    assert known - rows == set(), "Megatron has new arguments: read what they do, and give each a row"
    assert rows - known == set(), "a typo, or Megatron has dropped them"
    assert sum(map(len, SUBJECTS.values())) == len(TABLE)


def test_what_a_release_lacks_has_a_row_because_another_release_has_it() -> None:
    assert set(LACKING) == {release.name for release in releases.RELEASES.values()}
    assert frozenset[str]().union(*LACKING.values()) <= set(TABLE)
    assert frozenset(TABLE).intersection(*LACKING.values()) == set()


def test_an_argument_without_a_row_is_refused() -> None:
    [line] = refusals({"new_in_megatron": 0}, {"new_in_megatron": None}, {"new_in_megatron": "--new-in-megatron"})
    assert line.startswith("--new-in-megatron is not supported with --resihp: ")


def test_megatrons_defaults_are_taken(parser: argparse.ArgumentParser) -> None:
    defaults = vars(parser.parse_args([]))
    assert refusals(defaults, defaults, {name: name for name in defaults}) == []


@pytest.mark.since_megatron("0.19")
def test_the_documentation_is_that_of_the_table(parser: argparse.ArgumentParser) -> None:
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    written = (ROOT / "docs" / "megatron-flags.md").read_text()
    command = "python -m megatron_resihp.integration.support.page > docs/megatron-flags.md"
    assert written == markdown(flags), f"run `{command}`"


def test_it_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_resihp.integration.support; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30, cwd=ROOT
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, False),
        ({"pipeline_model_parallel_layout": "Et*2|(t|)*2t,m*2,L"}, False),
        ({"pipeline_model_parallel_layout": "Ett|tm*2|L"}, True),
        ({"untie_embeddings_and_output_weights": False}, True),
        ({"defer_embedding_wgrad_compute": True}, True),
        ({"dataloader_inter_document_masking": True}, True),
    ],
)
def test_further_tokens_are_predicted_beside_a_head_with_weights_of_its_own(
    changed: dict[str, object], refused: bool
) -> None:
    values = {
        "mtp_num_layers": 2, "untie_embeddings_and_output_weights": True, "pipeline_model_parallel_layout": None,
        "defer_embedding_wgrad_compute": False, "dataloader_inter_document_masking": False,
    } | changed  # fmt: skip
    line = TABLE["mtp_num_layers"].refusal(values, {}, {"mtp_num_layers": "--mtp-num-layers"})
    assert (line is not None) == refused
    assert TABLE["mtp_num_layers"].refusal(values | {"mtp_num_layers": None}, {}, {}) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"untie_embeddings_and_output_weights": False}, "--untie-embeddings-and-output-weights"),
        ({"pipeline_model_parallel_layout": "Et*2m|tL"}, "--pipeline-model-parallel-layout"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        ({"dataloader_inter_document_masking": True}, "--dataloader-inter-document-masking"),
        ({"mtp_num_layers": 0, "untie_embeddings_and_output_weights": False}, "in place of 0"),
    ],
)
def test_only_what_stands_in_the_way_of_predictions_is_named(changed: dict[str, object], named: str) -> None:
    values = {
        "mtp_num_layers": 1, "untie_embeddings_and_output_weights": True, "pipeline_model_parallel_layout": "Et|tmL",
        "defer_embedding_wgrad_compute": False, "dataloader_inter_document_masking": False,
    } | changed  # fmt: skip
    line = TABLE["mtp_num_layers"].refusal(values, {}, {"mtp_num_layers": "--mtp-num-layers"})
    assert line is not None and named in line
    assert line.count("--") == 2 + named.count("--"), "none of the other conditions"


def test_each_refusal_says_why_and_what_to_do() -> None:
    for row in TABLE.values():
        assert row.supported or (row.why and row.instead), row.name
        assert not (row.why and row.supported), row.name
        if isinstance(row.condition, Needs):
            assert row.condition.other in SUPPORTED, row.name


# ---- evidence


def test_places_in_megatron_exist_and_name_the_flag() -> None:
    """The module does. So a place that no longer reads the flag is noticed."""
    wrong = [f"{row.name}: {place_of(row)}" for row in READ if not has_place(row)]
    assert wrong == []


def test_what_computes_nothing_of_a_step_is_called_no_kernel() -> None:
    kernels = [row for row in TABLE.values() if row.evidence is Evidence.KERNEL]
    assert [row.name for row in kernels if row.shown.removeprefix("megatron.").startswith(BESIDE_STEPS)] == []
    assert not NO_KERNELS & {row.name for row in kernels}


def place_of(row: Row) -> str:
    return (row.shown_in_018 if RELEASE == "0.18" else "") or row.shown


def has_place(row: Row) -> bool:
    module, _, path = place_of(row).partition(":")
    source = source_of(module)
    names = (row.name, f"--{row.name.replace('_', '-')}")
    return path in definitions_of(module) and any(re.search(rf"(?<!\w){name}\b", source) for name in names)


@cache
def source_of(module: str) -> str:
    path = MEGATRON.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@cache
def definitions_of(module: str) -> frozenset[str]:
    """Functions and classes, those that need an installed Transformer Engine included; a class's own with its name."""
    found: set[str] = set()

    def look(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found.add(above + child.name)
                look(child, f"{above}{child.name}.")
            else:
                look(child, above)

    look(ast.parse(source_of(module)), "")
    return frozenset(found)


def test_tests_exist_and_name_the_flag(parser: argparse.ArgumentParser) -> None:
    """So that a test that was renamed, or a flag that was taken out of it, is noticed."""
    for row in HELD:
        file, _, function = row.shown.partition("::")
        assert function in functions_of(ROOT / file), row.shown
        [action] = [action for action in parser._actions if action.dest == row.name]
        spellings = {row.name, *(option[2:].replace("-", "_") for option in action.option_strings)}
        assert spellings & words_around(ROOT / file), f"{file} has no {row.name}"


def test_what_does_nothing_without_another_flag_still_lacks_it() -> None:
    """Once the other one is supported, these have an effect: give them evidence of their own."""
    for row in TABLE.values():
        other, _, value = row.without.partition("=")
        if value:
            condition = TABLE[other].condition
            assert condition is not None and condition.refusal(
                other, {"num_experts": 8, other: value}, {other: other}
            ), row.name
        elif other:
            assert not TABLE[other].supported or TABLE[other].given_up, (
                f"{row.name} is said to do nothing without {other}"
            )


def test_what_nothing_reads_is_read_by_nothing() -> None:
    unread = {row.name for row in PRESENT if row.unread and place_of(row) == row.shown}
    pattern = re.compile(r"\b(" + "|".join(unread) + r")\b")
    found = {name: path for path in training_sources() for name in pattern.findall(path.read_text()) if name in unread}
    read = {name: str(path) for name, path in found.items() if name in names_read(path)}
    assert not read


def training_sources() -> list[Path]:
    sources = []
    for path in MEGATRON.rglob("*.py"):
        parts = path.relative_to(MEGATRON).parts
        if parts[:2] == ("core", "inference") or path.name == "yaml_arguments.py":
            continue
        if parts[:2] != ("core", "models") or parts[2] not in OTHER_MODELS:
            sources.append(path)
    return sources


@cache
def names_read(path: Path) -> frozenset[str]:
    """Attributes and keys that a source reads; not those that it adds to the parser."""
    tree = ast.parse(path.read_text())
    added = {id(word.value) for call in ast.walk(tree) if isinstance(call, ast.Call) for word in call.keywords}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in added
    }
    return frozenset(attributes | keys)


@cache
def functions_of(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


@cache
def words_around(path: Path) -> frozenset[str]:
    """All words of a test file and of those beside it that it imports."""
    text = path.read_text()
    beside = re.findall(r"^from (\w+) import", text, re.MULTILINE)
    files = [path.with_name(f"{name}.py") for name in beside if path.with_name(f"{name}.py").exists()]
    return frozenset(re.findall(r"\w+", text)).union(*map(words_around, files))
