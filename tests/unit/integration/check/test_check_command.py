# SPDX-License-Identifier: Apache-2.0
"""What `resihp check` says of command lines, held against Megatron's own parser and validation."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from megatron.training import arguments

from megatron_resihp.integration.check import command, elsewhere
from megatron_resihp.integration.check.findings import Findings
from megatron_resihp.integration.check.unknown import FORMER
from megatron_resihp.planner import NoPlanError

LLAMA = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu
    --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights
    --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 128
    --train-iters 1000 --lr 1e-4 --bf16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --split 99,1,0 --log-interval 1 --eval-iters 32 --eval-interval 100
    --save-interval 1000 --save out --load out
"""
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256"
TORCHRUN = "--nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr head --master_port 29500"

Look = Callable[..., Findings]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: None) -> Look:
    """Checks `TORCHRUN train.py LLAMA WORDS --resihp`."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("parser.add_argument('--of-the-script', type=int)\nraise SystemExit('not to be run')\n")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    def look(
        words: str = "",
        launch: str = TORCHRUN,
        environment: Mapping[str, str] = {},
        data: str = MOCK_DATA,
        flag: str = "--resihp",
    ) -> Findings:
        asked = parser.parse_args([*launch.split(), "train.py", *shlex.split(f"{LLAMA} {data} {words} {flag}")])
        options, uncounted = command._asked(asked)
        return command.look(options, Path("train.py"), asked.memory_gib, environment, uncounted)

    return look


def test_a_job_that_would_be_let_in(look: Look) -> None:
    found = look(launch=f"{TORCHRUN} --memory-gib 80")
    assert found.let_in and found.refusals == () == found.unknown
    lines = list(found.lines())
    assert lines[0] == "train.py, 16 workers (--nnodes 2 --nproc-per-node 8)"
    assert lines[-1] == "resihp: the job would be accepted; no flag is changed"
    assert any(
        "losing node 0 (the coordinator's) or node 1 ends the job" in line and "--resihp-spread-replicas" in line
        for line in lines
    ), "as the job itself says at its start"
    assert sum("fits: 73.6 GiB may be used" in line for line in lines) == 3
    assert [note.partition(" with ")[0] for note in found.notes] == ["Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert not look(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).notes
    assert not look("--overlap-moe-expert-parallel-comm").notes, "Megatron doesn't ask for one connection then"


@pytest.mark.parametrize("more", ["", "--resihp-megatron-random-streams"])
def test_masks_that_are_others_than_megatrons(look: Look, more: str) -> None:
    found = look(f"--hidden-dropout 0.1 {more}")
    assert found.let_in
    assert any("--resihp-megatron-random-streams" in note for note in found.notes) == (not more)


def test_masks_are_none_of_a_job_without_the_plugin(look: Look) -> None:
    found = look("--hidden-dropout 0.1", flag="")
    assert not any("masks" in note for note in found.notes)


def test_every_refusal_at_once(look: Look) -> None:
    words = "--inprocess-restart --optimizer lion --global-batch-size 127 --no-such-flag 3 --of-the-script 4 --lr much"
    found = look(f"{words} --resihp-strategy best --load-balance nothing --seqlength 3")
    flags = [refusal["flag"] for refusal in found.as_json()["refusals"]]
    assert {"--lr", "--resihp-strategy", "--inprocess-restart", "--optimizer", "--global-batch-size"} <= set(flags)
    assert all(refusal["reason"] and refusal["fix"] for refusal in found.as_json()["refusals"])
    assert found.unknown == ("--load-balance", "--no-such-flag", "--seqlength (do you mean --seq-length?)")
    assert list(found.lines())[-1].startswith("resihp: the job would be refused: 5 reasons, see above")


def test_flags_that_only_the_script_may_know(look: Look) -> None:
    """Megatron's parser ends the job on those that it doesn't."""
    found = look("--use-mpi --moe-type none --no-query-key-layer-scaling --tensor-model-paralel-size 2")
    *_, last = found.lines()
    assert found.let_in and last == (
        "resihp: the job would be accepted if the script defines --moe-type, --no-query-key-layer-scaling, "
        "--tensor-model-paralel-size and 1 more; no flag is changed"
    )
    assert found.unknown == (
        "--moe-type",
        "--no-query-key-layer-scaling (leave it out: nothing is scaled without --apply-query-key-layer-scaling)",
        "--tensor-model-paralel-size (do you mean --tensor-model-parallel-size?)",
        "--use-mpi",
    ), "neither --rope-type nor --apply-query-key-layer-scaling nor --use-mup was meant"


def test_flags_that_the_script_is_known_not_to_have(look: Look) -> None:
    """They would end the job on every worker."""
    Path("train.py").write_text("parse_and_validate_args(args_defaults={})\n")
    found = look("--tensor-model-paralel-size=2 --no-query-key-layer-scaling --no-such-flag 3")
    refusals = found.as_json()["refusals"]
    assert [(each["flag"], each["fix"]) for each in refusals] == [
        ("--no-query-key-layer-scaling", "leave it out: nothing is scaled without --apply-query-key-layer-scaling"),
        ("--no-such-flag", "a fork's flag? leave it out only if the model does not need it"),
        ("--tensor-model-paralel-size", "do you mean --tensor-model-parallel-size?"),
    ]
    assert {each["reason"].partition(": ")[2] for each in refusals} == {"neither Megatron nor the script has this flag"}
    assert found.unknown == ()


COMPLETE = "parse_and_validate_args(args_defaults={})\n"


def test_words_that_no_flag_takes(look: Look) -> None:
    """A shell has divided a value that has spaces, and Megatron's parser ends the job on what is left over."""
    schedule = "--train-samples 100000 --step-batch-size-schedule 0:16 2.4B:320 4.8B:624 --seed 3"
    Path("train.py").write_text(f"{COMPLETE}parser.add_argument('--own')")
    refusals = look(f"extra --own 4 {schedule} --sequence-parallel words", data=f"first {MOCK_DATA}").refusals
    lines = [line for line in refusals if "no flag takes" in line]
    assert lines == [
        f"{words}: no flag takes {what}; if the value of {flag} has spaces, quote it; otherwise leave out `{words}`"
        for words, what, flag in (
            ("first", "this word", "--load"),
            ("extra", "this word", "--vocab-size"),
            ("2.4B:320 4.8B:624", "these words", "--step-batch-size-schedule"),
            ("words", "this word", "--sequence-parallel"),
        )
    ]


def test_an_empty_word(look: Look) -> None:
    """A shell has put nothing in the place of a variable that it doesn't know."""
    Path("train.py").write_text(COMPLETE)
    found = look("--sequence-parallel '' --num-query-groups ''")
    assert {(each["reason"], each["fix"]) for each in found.as_json()["refusals"]} == {
        ("an empty word after --sequence-parallel, which no flag takes", "an unset shell variable?"),
        ("--num-query-groups: invalid int value: ''", "an empty word: an unset shell variable?"),
    }


def test_quotes_inside_of_quotes(look: Look) -> None:
    (refusal,) = look("""--moe-layer-freq "'([0]*3+[1]*5)'" """).refusals
    assert refusal.startswith("--moe-layer-freq: ") and refusal.endswith("; remove the quotes inside of the quotes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fp8-hybrid", "give --fp8-format hybrid"),
        ("--checkpoint-num-layers 1", "give --recompute-num-layers"),
        ("--wandb-name run", "give --wandb-exp-name"),
        ("--legacy-tokenizer", "leave it out: Megatron has only one kind of tokenizers now"),
    ],
)
def test_flags_that_megatron_had_once(look: Look, words: str, said: str) -> None:
    flag = words.split()[0]
    assert look(words).unknown == (f"{flag} ({said})",)
    Path("train.py").write_text(COMPLETE)
    (refusal,) = look(words).refusals
    assert refusal == f"{flag}: neither Megatron nor the script has this flag; {said}"


def test_words_that_only_the_script_may_know(look: Look) -> None:
    found = look("--sequence-parallel words --of-the-script 4 --no-such-flag 5")
    assert found.let_in
    (note,) = [note for note in found.notes if "no flag takes" in note]
    assert note.startswith("unless the script takes it: words: no flag takes this word; ")


@pytest.mark.parametrize("added", ["'-e', '--extra'", "'corpus', nargs='?'"])
def test_short_options_and_words_that_a_script_takes(look: Look, added: str) -> None:
    Path("train.py").write_text(f"{COMPLETE}parser.add_argument({added})")
    found = look("-e 3 --seed 3")
    assert found.let_in and any("unless the script takes it: -e 3: " in note for note in found.notes)


def test_a_value_that_begins_like_a_flag(look: Look) -> None:
    """argparse takes a word with a space for a value."""
    Path("train.py").write_text(f"{COMPLETE}parser.add_argument('--prompts', nargs='*')")
    assert look("--wandb-exp-name '--my run' --prompts a b").let_in


def test_a_flag_of_ours_that_is_misspelled(look: Look) -> None:
    assert "--resihpp (do you mean --resihp?)" in look("--resihpp").unknown
    Path("train.py").write_text(COMPLETE)
    line = (
        "--resihp-spred-replicas: neither Megatron nor the script has this flag; do you mean --resihp-spread-replicas?"
    )
    assert line in look("--resihp-spred-replicas").refusals


def test_options_of_the_commands_behind_the_script(look: Look) -> None:
    words = "--max-restarts 3 --memory-gib 80"
    assert look(words).unknown == (
        "--max-restarts (an option of resihp launch: put it before the script)",
        "--memory-gib (an option of resihp check: put it before the script)",
    )
    Path("train.py").write_text(COMPLETE)
    assert look(words).refusals == (
        "--max-restarts is an option of resihp launch; put it before the script",
        "--memory-gib is an option of resihp check; put it before the script",
    )


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        ("--lr 1e-4", "--lr is missing; "),
        ("--train-iters 1000", "--train-iters is missing, and so is --train-samples; "),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type is missing, "),
    ],
)
def test_flags_that_training_needs(look: Look, monkeypatch: pytest.MonkeyPatch, left_out: str, line: str) -> None:
    """Megatron's parser lets a job pass without them, and each worker ends with an error of Python's."""
    monkeypatch.setitem(globals(), "LLAMA", LLAMA.replace(left_out, ""))
    data = MOCK_DATA.replace(left_out, "")
    for text in ("", COMPLETE):
        Path("train.py").write_text(text)
        found = look(data=data)
        assert found.let_in, "a script may set them in code"
        assert [note.startswith(line) for note in found.notes if "is missing" in note] == [True]
    given = {"lr": 1e-4, "train_samples": 1000, "tokenizer_type": "NullTokenizer"}
    Path("train.py").write_text(f"parse_and_validate_args(args_defaults={given})\n")
    assert "is missing" not in str(look(data=data).notes)


def test_a_flag_that_can_not_be_read_is_not_called_missing(look: Look) -> None:
    Path("train.py").write_text(COMPLETE)
    found = look("--lr much")
    assert [refusal.partition(":")[0] for refusal in found.refusals] == ["--lr"]
    assert "is missing" not in str(found.notes)


def test_a_sequence_that_the_members_of_a_stage_can_not_share(look: Look) -> None:
    (refusal,) = look("--seq-length 1023").refusals
    assert refusal == (
        "--seq-length 1023 is not a multiple of TP = 2, as --sequence-parallel needs; give a multiple, or leave that "
        "flag out"
    )
    assert look("--seq-length 1023 --tensor-model-parallel-size 1").let_in, "Megatron leaves the flag out then"


def test_files_of_a_tokenizer_that_are_not_here(look: Look) -> None:
    kinds = "--mock-data --tokenizer-type"
    lacking = look(data=f"{kinds} GPTSentencePieceTokenizer --tokenizer-model far/away --vocab-file /far/vocab.json")
    assert lacking.let_in
    assert [note.partition(" does not")[0] for note in lacking.notes if "not seen" in note] == [
        "not seen from here: --tokenizer-model far/away",
        "not seen from here: --vocab-file /far/vocab.json",
    ]
    on_hub = look(data=f"{kinds} HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B")
    assert not any("not seen" in note for note in on_hub.notes)
    (note,) = [n for n in look(data=f"{kinds} HuggingFaceTokenizer --tokenizer-model /far/away").notes if "seen" in n]
    assert note.startswith("not seen from here: --tokenizer-model /far/away does not exist")


def test_a_checkpoint_that_has_to_be_there_and_is_not(look: Look) -> None:
    (note,) = [note for note in look("--exit-on-missing-checkpoint").notes if "not seen" in note]
    assert note.startswith("not seen from here: --load out has no checkpoint, ")
    Path("out").mkdir()
    Path("out/latest_checkpointed_iteration.txt").write_text("1000")
    assert not any("not seen" in note for note in look("--exit-on-missing-checkpoint").notes)


@pytest.mark.parametrize(
    ("installed", "words", "said"),
    [
        ({"transformer_engine"}, "", True),
        ({"transformer_engine"}, "--no-gradient-accumulation-fusion", False),
        ({"transformer_engine", "fused_weight_gradient_mlp_cuda"}, "", False),
        (set(), "", False),
    ],
)
def test_the_kernel_that_the_installation_for_gpus_does_not_bring(
    look: Look, monkeypatch: pytest.MonkeyPatch, installed: set[str], words: str, said: bool
) -> None:
    """A login node may lack it where the job's nodes don't: it keeps no job out."""
    monkeypatch.setattr(elsewhere, "_is_installed", installed.__contains__)
    found = look(words)
    assert found.let_in and any("--no-gradient-accumulation-fusion" in note for note in found.notes) == said
    assert not any("Apex" in note for note in look(words, launch="--stand-in --nproc-per-node 8").notes)


def test_one_worker_is_not_many(look: Look) -> None:
    alone = look("--tensor-model-parallel-size 1", launch="--nproc-per-node 1")
    assert next(alone.lines()) == "train.py, 1 worker (--nnodes 1 --nproc-per-node 1)"


def test_former_flags_are_none_of_megatrons() -> None:
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert not FORMER.keys() & parser._option_string_actions.keys()
    assert all(f"--{word}" in parser._option_string_actions for word in ["apply-query-key-layer-scaling"])


@pytest.mark.parametrize("words", ["--attention-backend quick", "--attention-backend=quick"])
def test_a_value_that_megatron_looks_up(look: Look, words: str) -> None:
    assert look(words).refusals == ("--attention-backend quick: no such value; see Megatron's --help",)


def test_a_request_for_help(look: Look) -> None:
    (refusal,) = look("--help").refusals
    assert refusal == "Megatron's parser ends the script: --help is among the flags; fix that"


def test_what_megatron_itself_refuses(look: Look) -> None:
    (refusal,) = look("--max-position-embeddings 64").refusals
    assert refusal.startswith("Megatron refuses these flags: ") and "max_position_embeddings" in refusal


def test_what_megatrons_validation_fails_at(look: Look) -> None:
    (refusal,) = look("--position-embedding-type learned_absolute --no-position-embedding").refusals
    assert refusal.startswith("Megatron refuses these flags: ")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "--num-attention-heads 12 --kv-channels 64 --tensor-model-parallel-size 8",
            "num_attention_heads (12)",
        ),
        ("--num-query-groups 3", "num_query_groups (3) must be a multiple or divisor"),
    ],
)
def test_a_model_that_no_worker_could_configure(look: Look, words: str, rule: str) -> None:
    (refusal,) = look(words).as_json()["refusals"]
    assert refusal["reason"].startswith("Megatron refuses these flags: ") and rule in refusal["reason"]
    assert refusal["fix"] == "change what it names"


def test_layers_that_are_left_over(look: Look) -> None:
    stages = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers"
    assert look(f"{stages} 5").let_in
    (refusal,) = look(f"{stages} 6 --decoder-last-pipeline-num-layers 5").refusals
    assert refusal.startswith("the pipeline can't be built: 21 layers are left for 2 stages, ")


@pytest.mark.parametrize(
    "words",
    [
        "--moe-permute-fusion --num-experts 8 --moe-router-topk 2",
        "--fp8-format hybrid --fp8-recipe tensorwise --num-experts 8",
        "--te-precision-config-file /far/away.yaml",
    ],
)
def test_what_only_a_login_node_lacks_keeps_no_job_out(look: Look, words: str) -> None:
    """Megatron looks for kernels, and for files, as it configures a model."""
    assert not any("Megatron refuses" in line for line in look(words).refusals)


def test_a_flag_on_which_megatrons_validation_ends_the_script(look: Look) -> None:
    (refusal,) = look("--checkpoint-activations").refusals
    assert refusal.startswith("--checkpoint-activations ")
    assert refusal.endswith(": Megatron no longer takes it; use --recompute-activations")


def test_sizes_that_a_checkpoint_has(look: Look) -> None:
    found = look("--use-checkpoint-args --load saved --inprocess-restart")
    assert [refusal.split()[0] for refusal in found.refusals] == ["--inprocess-restart"]
    assert any("sizes are in the checkpoint" in note for note in found.notes)


def test_what_a_script_gives_itself_is_checked_where_sizes_are_in_a_checkpoint(look: Look) -> None:
    text = "from megatron.training import pretrain\npretrain(args_defaults={'dataloader_type': 'external'})\n"
    Path("train.py").write_text(text)
    (refusal,) = look("--use-checkpoint-args --load saved").refusals
    assert refusal.startswith("--dataloader-type external is not supported with --resihp")


def test_arguments_in_a_file(look: Look) -> None:
    (refusal,) = look("--yaml-cfg missing.yaml").refusals
    assert refusal.startswith("--yaml-cfg is not supported with --resihp: ") and refusal.endswith("; give flags")


def test_sizes_that_do_not_fit(look: Look) -> None:
    (refusal,) = look("--pipeline-model-parallel-size 16").refusals
    assert refusal.startswith("16 workers are not a multiple of TP x PP = 32, so no plan exists; start 32")
    (refusal,) = look("--global-batch-size 4").refusals
    assert refusal == ("--global-batch-size 4 gives 8 replicas less than one micro-batch each; give 8 or a multiple"), (
        "Megatron would name a flag that nobody gave"
    )


MIXTURE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-experts 8 --moe-router-topk 2"


def test_workers_that_can_not_share_experts_out(look: Look) -> None:
    """Megatron and the coordinator would end the job as it begins."""
    (refusal,) = look(f"{MIXTURE} --expert-model-parallel-size 8", launch="--nproc-per-node 8").refusals
    assert refusal == (
        "8 workers are not a multiple of experts' TP x EP x PP = 32, so no plan exists; start 32 or change the "
        "parallel sizes"
    )
    (refusal,) = look(f"{MIXTURE} --expert-model-parallel-size 8", launch="--nproc-per-node 1").refusals
    assert refusal.startswith("1 worker is not a multiple of TP x PP = 4, so no plan exists; start 32 or ")
    assert look(f"{MIXTURE} --expert-model-parallel-size 8", launch="--nproc-per-node 8 --nnodes 4").let_in


def test_a_job_without_a_first_plan_is_refused(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the coordinator ends it, whatever other checks have let through."""

    def none(*_: object) -> None:
        raise NoPlanError("7 micro-batches cannot be shared evenly by 8 replicas at the start")

    monkeypatch.setattr("megatron_resihp.integration.check.losses.initial_plan", none)
    found = look()
    (refusal,) = found.refusals
    assert refusal.startswith("7 micro-batches cannot be shared evenly by 8 replicas at the start, so no plan exists")
    assert not any("micro-batches" in note for note in found.notes)


@pytest.mark.parametrize("sizes", ["--tensor-model-parallel-size 3 --seq-length 8190", "--global-batch-size 127"])
def test_sizes_that_do_not_fit_hide_nothing(look: Look, sizes: str) -> None:
    """Neither what Megatron asserts nor what we do, and nothing is said of sizes that nobody gave."""
    _, *others = look(f"{sizes} --num-attention-heads 12 --kv-channels 128 --num-query-groups 5").refusals
    assert len(others) == 1 and "num_query_groups (5)" in others[0]
    _, *others = look(f"{sizes} --max-position-embeddings 64 --eval-global-batch-size 100").refusals
    assert len(others) == 1 and "max_position_embeddings" in others[0]


def test_the_environment_of_a_launch_script(look: Look) -> None:
    found = look(environment={"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_CUMEM_ENABLE": "0", "CUDA_LAUNCH_BLOCKING": "1"})
    overruled, *harmful = found.environment
    assert overruled == "NCCL_ASYNC_ERROR_HANDLING=1 becomes 0: recovery needs it; unset it"
    assert [line.partition("=")[0] for line in harmful] == ["NCCL_CUMEM_ENABLE", "CUDA_LAUNCH_BLOCKING"]
    assert found.let_in


def test_an_overlap_that_is_not_always_there(look: Look) -> None:
    (line,) = look().without_overlap
    assert line.startswith("--overlap-grad-reduce: while replicas differ in shape, gradients of parameters")


def test_overlaps_of_gathering_and_of_experts(look: Look) -> None:
    gathering = "--overlap-param-gather --overlap-param-gather-with-optimizer-step"
    _, *lines = look(f"{gathering} --overlap-moe-expert-parallel-comm").without_overlap
    assert lines == [
        "--overlap-param-gather: while replicas differ in shape, no parameters are gathered",
        "--overlap-param-gather-with-optimizer-step: while replicas differ in shape, no parameters are gathered",
        "--overlap-moe-expert-parallel-comm: while each worker has all experts, there is nothing to overlap",
    ]


def test_an_overlap_that_no_plan_has(look: Look) -> None:
    found = look("--tp-comm-overlap --tp-comm-bootstrap-backend nccl --no-tp-comm-bulk-wgrad")
    assert found.let_in, found.refusals
    (line,) = found.given_up
    assert line.startswith("--tp-comm-overlap: under every plan: Transformer Engine's kernels wait in each other's")
    assert f"  {line}" in found.lines()
    assert [*found.lines()][-1] == "resihp: the job would be accepted; it would run without --tp-comm-overlap"


def test_data_may_be_elsewhere_and_a_tokenizer_is_not_opened(look: Look) -> None:
    found = look(data="--data-path /far/away_document --tokenizer-type GPT2BPETokenizer --vocab-file /far/vocab")
    assert found.let_in, found.refusals
    assert any(note.startswith("not seen from here: --data-path /far") for note in found.notes)
    assert "the vocabulary is counted as 131,072 rows; only the tokenizer knows how many there are" in found.notes
    blend = " ".join(f"{1 / 235} /far/document_{number}" for number in range(235))
    blended = look(data=MOCK_DATA.replace("--mock-data", f"--data-path {blend}"))
    (note,) = [each for each in blended.notes if "far" in each]
    assert "/far/document_0.idx does not exist, nor 234 more of 235; give prefixes" in note


def test_memory_that_does_not_suffice_keeps_no_job_out(look: Look) -> None:
    found = look(launch="--nproc-per-node 8 --memory-gib 24")
    assert found.let_in and any("DOES NOT FIT" in line for line in found.lines())


def run(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """The whole command; its exit code and what it said."""
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(command, "missing", lambda modules: None)
    monkeypatch.setattr("megatron_resihp.cpu.install", lambda force: True)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(words.split()))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_exit_codes_and_json(look: Look, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"--json {TORCHRUN} train.py {LLAMA} {MOCK_DATA} --resihp"
    code, out, _ = run(asked, capsys, monkeypatch)
    found: dict[str, Any] = json.loads(out)
    assert (code, found["let_in"], found["refusals"]) == (0, True, [])
    assert found["outlook"]["first"]["bytes"] > 2**30
    code, out, _ = run(f"{asked} --inprocess-restart", capsys, monkeypatch)
    assert code == 2 and [each["flag"] for each in json.loads(out)["refusals"]] == ["--inprocess-restart"]


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_workers_that_are_counted_where_there_is_no_gpu(
    look: Look, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """A login node. It hides no other refusal, and nothing is said of sizes."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    launch = f"--json --nnodes 2 --min-workers 3 --nproc-per-node {word}"
    code, out, _ = run(
        f"{launch} train.py {LLAMA} {MOCK_DATA} --resihp --inprocess-restart --num-query-groups 5 "
        "--resihp-inject kill:9@3 --eval-global-batch-size 100",
        capsys,
        monkeypatch,
    )
    found = json.loads(out)
    assert code == 2 and found["job"] == "train.py, an unknown number of workers"
    count, *others = found["refusals"]
    assert count["flag"] == "--nproc-per-node" and count["fix"] == "give how many workers each node has"
    assert ["--inprocess-restart" in each["reason"] for each in others] == [True, False]
    assert "num_query_groups (5)" in others[1]["reason"]


def test_the_file_of_a_module(look: Look) -> None:
    Path("trainer").mkdir()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for name, file in (("trainer.main", "trainer/main.py"), ("trainer", "trainer/__main__.py")):
        Path(file).touch()
        options, _ = command._asked(parser.parse_args(["-m", name]))
        assert command._script(options) == Path(file).resolve()


def test_what_launch_would_refuse(
    look: Look, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, said in (
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0 starts no worker; give 1 or more"),
        ("no.py", "no.py does not exist; give a Python script"),
    ):
        assert run(words, capsys, monkeypatch) == (2, "", f"resihp: {said}\n")


def test_without_megatron(look: Look, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(command, "missing", lambda modules: f"{' and '.join(modules)} is not installed")
    assert command.run(parser.parse_args(["train.py"])) == 2
    assert capsys.readouterr().err == "resihp: megatron.core is not installed\n"


def test_a_megatron_of_another_version_beside_the_script(
    look: Look, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork's: it can't be imported here, and nobody tries."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("import no_such_module")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.path_importer_cache", {})
    code, out, _ = run(f"--json {TORCHRUN} train.py {LLAMA} --resihp", capsys, monkeypatch)
    (refusal,) = json.loads(out)["refusals"]
    assert code == 2 and refusal["reason"] == f"megatron-core 0.12.1 in {tmp_path} is not supported"


def test_a_megatron_that_lacks_modules_of_its_release(
    look: Look, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any, **__: Any) -> Findings:
        raise ModuleNotFoundError("No module named 'megatron.core.new'", name="megatron.core.new")

    monkeypatch.setattr(command, "look", lacks)
    code, out, _ = run(f"--json {TORCHRUN} train.py {LLAMA} --resihp", capsys, monkeypatch)
    (refusal,) = json.loads(out)["refusals"]
    assert code == 2 and refusal["reason"].endswith("patches were written for: No module named 'megatron.core.new'")
