# SPDX-License-Identifier: Apache-2.0
"""A job of two nodes whose connections are encrypted: it recovers as others do, and takes commands from those only that
have a certificate of its authority.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from authority import authority, sign, variables
from jobs import NODES_SECRET, Jobs, check_training, tiny
from test_nodes import TWO_NODES, free_port

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.contact import reach
from megatron_resihp.control.transport.access.secret import VARIABLE

pytestmark = pytest.mark.nightly


def with_own(folder: Path) -> Path:
    sign(authority(folder))
    return folder


def test_a_death_and_a_whole_node_that_dies(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, strangers = with_own(tmp_path / "own"), with_own(tmp_path / "strangers")
    sign(own, "second")
    arguments = tiny(**TWO_NODES | {"train_iters": 30})
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    first, second = (
        jobs.start(arguments, workers=2, nodes=2, node=node, coordinator=coordinator, environment=variables(own, name))
        for node, name in enumerate(("own", "second"))
    )
    first.await_event("iteration", iteration=3)
    monkeypatch.setenv(VARIABLE, NODES_SECRET)
    told = ["stop", str(first.run_dir)]
    assert main(told) != 0
    assert "it speaks TLS only; set RESIHP_TLS_CACERT" in capsys.readouterr().err
    for name, value in variables(strangers, ca=own).items():
        monkeypatch.setenv(name, value)
    assert main(told) != 0
    assert "it refuses this process's certificate" in capsys.readouterr().err
    for name, value in variables(own).items():
        monkeypatch.setenv(name, value)
    reach(first.run_dir).close()
    second.kill()
    check_training(first.wait(), reference)
    assert {death.worker for death in first.summary.deaths} == {2, 3}


def test_a_node_without_certificates_is_refused_in_one_line(jobs: Jobs, tmp_path: Path) -> None:
    own, coordinator = with_own(tmp_path / "own"), ["127.0.0.1", free_port()]
    arguments = tiny(**TWO_NODES)
    first = jobs.start(arguments, workers=2, nodes=2, node=0, coordinator=coordinator, environment=variables(own))
    second = jobs.start(arguments, workers=2, nodes=2, node=1, coordinator=coordinator)
    second.wait()
    assert second.code == exit_codes.REFUSED and "set RESIHP_TLS_CACERT" in second.output()
    first.kill()
