# SPDX-License-Identifier: Apache-2.0
"""What integration tests share: one nursery, one data set and the reference runs of a session, and etcds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from etcds import Etcd
from jobs import REPOSITORY, Jobs, Nursery

from megatron_resihp.control.transport.etcd.location import Location

SCRIPT = REPOSITORY / "scripts" / "make_dataset.py"
MAKE_S = 60.0
COMPILE_S = 300.0


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    directory = tmp_path_factory.mktemp("jobs")
    nursery = Nursery()
    yield Jobs(nursery, directory)
    nursery.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Of one member; each test has a run of its own there."""
    with closing(Etcd(tmp_path_factory.mktemp("etcd"))) as made:
        yield made


@pytest.fixture
def place(etcd: Etcd, request: pytest.FixtureRequest) -> Location:
    return etcd.location(re.sub(r"\W", "", request.node.name))


@pytest.fixture(scope="session")
def compiled_planner() -> None:
    """The planner's machine code is there, so that no job shares the cores with a compiler for most of a minute."""
    subprocess.run([sys.executable, "-m", "megatron_resihp.planner.practice"], check=True, timeout=COMPILE_S)


@pytest.fixture(scope="session")
def documents(jobs: Jobs) -> Path:
    """Prefix of an indexed data set of documents that are mostly shorter than a sample."""
    texts, prefix = jobs.directory / "documents.jsonl", jobs.directory / "documents"
    random = Random(0)
    lengths = [random.choice((3, 7, 12, 20, 50)) for _ in range(600)]
    texts.write_text("".join(json.dumps({"text": "abcdefghijklmnopqrstuvwxy"[-n:] * 2}) + "\n" for n in lengths))
    subprocess.run([sys.executable, SCRIPT, prefix, texts], check=True, timeout=MAKE_S)
    return prefix
