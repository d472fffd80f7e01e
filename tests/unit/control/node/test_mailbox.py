# SPDX-License-Identifier: Apache-2.0
"""Signals to a launcher that has no workers yet."""

from __future__ import annotations

import signal

import pytest

from megatron_resihp.control.node.mailbox import signals_while_waiting


def test_a_launcher_that_waits_ends_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, signals_while_waiting():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "resihp: ended by SIGTERM before it had begun\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_order_to_save_means_only_nodes_that_train() -> None:
    with signals_while_waiting():
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
