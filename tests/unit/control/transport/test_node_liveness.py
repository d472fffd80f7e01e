# SPDX-License-Identifier: Apache-2.0
"""Which nodes node 0 waits for."""

from __future__ import annotations

import socket

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.secret import fresh_secret
from megatron_resihp.control.transport.node_liveness import NodeLoss, NodeWatcher


def test_only_nodes_that_begin_the_job_have_to_connect() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        watcher = NodeWatcher(
            listener, fresh_secret(), JobSize(nodes=2, workers_per_node=1, late_nodes=2), 1.0, connect_by=10.0
        )
        assert watcher.look(9.8) == []
        assert watcher.look(10.2) == [NodeLoss(1, "did not connect")]
        watcher.close()


def test_nobody_is_late_for_a_watcher_that_was_stopped() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        watcher = NodeWatcher(listener, fresh_secret(), JobSize(nodes=2, workers_per_node=1), 1.0, connect_by=10.0)
        assert watcher.look(9.8) == []
        assert watcher.look(3609.8) == [], "stopped for an hour"
        assert watcher.look(3610.0) == []
        assert watcher.look(3610.2) == [NodeLoss(1, "did not connect")]
        watcher.close()


def test_a_node_that_is_known_to_be_gone_is_not_waited_for() -> None:
    gone = set[int]()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        size = JobSize(nodes=3, workers_per_node=1, apart=True)
        watcher = NodeWatcher(listener, fresh_secret(), size, 1.0, 120.0, returning={0, 1}, gone=lambda: gone)
        assert watcher.look(0.2) == []
        gone |= {0, 2}
        assert watcher.look(0.4) == [NodeLoss(0, "lost together with the coordinator")], "2 is not awaited"
        assert watcher.look(0.6) == [], "it is told once"
        watcher.close()
