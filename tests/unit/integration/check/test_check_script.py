# SPDX-License-Identifier: Apache-2.0
"""What a script's text tells of its flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_resihp.integration.check.script import read_script


def test_flags_and_defaults_of_a_script_and_of_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, builders\n"
        "raise SystemExit('this must not be run')\n"
        "pretrain(args_defaults={'tokenizer_type': 'GPT2BPETokenizer'})\n"
        "def more(parser): parser.add_argument('--own-flag', '--own', type=int)\n"
    )
    (tmp_path / "builders.py").write_text("import train\ngroup.add_argument('--depth')\nf(args_defaults={'lr': 1})\n")
    (tmp_path / "other.py").write_text("parser.add_argument('--of-another-script')\n")
    found = read_script(tmp_path / "train.py")
    assert found.added == {"--own-flag", "--own", "--depth"}
    assert found.defaults == {"tokenizer_type": "GPT2BPETokenizer"}


def test_a_flag_that_has_an_opposite(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("p.add_argument('--freeze', action=argparse.BooleanOptionalAction)")
    assert read_script(tmp_path / "train.py").added == {"--freeze", "--no-freeze"}


def test_modules_of_packages_and_of_other_folders(tmp_path: Path) -> None:
    """Of Megatron's own, those that the script names: what they import is not the script's."""
    files = {
        "code/train.py": "from megatron.post.flags import add\nfrom own.flags import more\nfrom own import models",
        "code/megatron/post/flags.py": "import megatron.training.flags\nadd_argument(1)\np.add_argument('--post')",
        "code/megatron/training/flags.py": "p.add_argument('--of-megatron')",
        "path/own/flags.py": "from own.deeper import x\np.add_argument('--more')",
        "path/own/deeper.py": "p.add_argument('--deeper')",
        "path/own/models/__init__.py": "p.add_argument('--model')",
        "path/own/idle.py": "p.add_argument('--idle')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = tmp_path / "code" / "train.py"
    assert read_script(script, [tmp_path / "path"]).added == {"--post", "--more", "--deeper", "--model"}
    assert read_script(script).added == {"--post"}


PARSES = "from megatron.training.arguments import parse_and_validate_args as _\nparse_and_validate_args(%s)\n"
PROVIDES = "def more(parser):\n    group = parser.add_argument_group(title='own')\n    group.add_argument('--own')\n"


@pytest.mark.parametrize(
    "text",
    [
        PARSES % "args_defaults={'tokenizer_type': 'GPT2BPETokenizer'}",
        PARSES % "extra_args_provider=None" + "import json, torch.nn, megatron.core\n",
        PROVIDES + PARSES % "extra_args_provider=more",
        "from flags import more\n" + PARSES % "extra_args_provider=more if more else None",
        "pretrain(datasets, model, kind, step)",
    ],
)
def test_a_script_all_of_whose_flags_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "flags.py").write_text(PROVIDES)
    (tmp_path / "train.py").write_text(text)
    assert read_script(tmp_path / "train.py").complete


@pytest.mark.parametrize(
    "text",
    [
        "import json",
        PARSES % "" + "import mindspeed.megatron_adaptor\n",
        PARSES % "" + "from .beside import x\n",
        PARSES % "" + "importlib.import_module(name)\n",
        PARSES % "" + "import broken\n",
        PARSES % "ignore_unknown_args=True",
        PARSES % "**options",
        PARSES % "more",
        PARSES % "extra_args_provider=partial(more, 3)",
        "from flags import more\nfrom other import more\n" + PARSES % "extra_args_provider=more",
        PROVIDES.replace("'--own'", "f'--{name}'") + PARSES % "extra_args_provider=more",
        PROVIDES + "    still_more(group)\n" + PARSES % "extra_args_provider=more",
        "def more(parser): return models.add_model_args(parser)\n" + PARSES % "extra_args_provider=more",
        "pretrain(datasets, model, kind, step, None, more)",
        "import sys\nsys.argv = [word for word in sys.argv if word != '--own']\n" + PARSES % "",
        "from sys import argv\nargv.remove('--own')\n" + PARSES % "",
        "arguments.parse_args = partial(arguments.parse_args, ignore_unknown_args=True)\n" + PARSES % "",
    ],
)
def test_a_script_that_may_have_other_flags(tmp_path: Path, text: str) -> None:
    (tmp_path / "flags.py").write_text(PROVIDES)
    (tmp_path / "other.py").write_text(PROVIDES)
    (tmp_path / "broken.py").write_text("this is no Python")
    (tmp_path / "train.py").write_text(text)
    assert not read_script(tmp_path / "train.py").complete


def test_megatrons_own_script_shows_all_its_flags() -> None:
    folder = os.environ.get("MEGATRON_LM_DIR")
    if folder is None:
        pytest.skip("needs a checkout of Megatron-LM: set MEGATRON_LM_DIR")
    found = read_script(Path(folder) / "pretrain_gpt.py")
    assert found.complete and "--export-model-type" in found.added


def test_a_script_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("this is no Python")
    assert read_script(tmp_path / "train.py").added == read_script(tmp_path / "no.py").added == frozenset()
