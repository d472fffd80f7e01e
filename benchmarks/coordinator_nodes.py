#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What nodes cost node 0 that join a job all at once and then send heartbeats.

Node 0's store and its watch over other nodes run in this process as in a job's. A second process is the agents of all
other nodes. Each has a thread, which joins by a connection to the store and a liveness connection, as a launcher does.
What workers say is not in here (`coordinator_scale.py`), nor their own connections.

`join_s` is from the first agent's start until node 0 holds all liveness connections, with both processes on the same
cores. `heartbeat_core_percent` is the CPU time of node 0's process in the seconds after that, in percent of one core,
with a heartbeat of each node every `heartbeat_s`. `lost` counts nodes that were given up, which none should be.
`memory_mib` is the most that node 0's process had in memory.

May import `megatron_resihp` without torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import selectors
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_result

from megatron_resihp.control.commands.launch.launch_options import LaunchOptions
from megatron_resihp.control.commands.launch.open_files import allow_as_many_as_may_be
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.agent import LOOK_S
from megatron_resihp.control.transport.access.secret import Secret, fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.node_liveness import Joining, Meeting, NodeWatcher, join, publish
from megatron_resihp.control.transport.sockets import reserve
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.server import StoreServer

WORKERS_PER_NODE: Final = 8
GOAL_JOIN_S: Final = 10.0
GOAL_CORE_PERCENT: Final = 5.0
OPTIONS: Final = LaunchOptions(command=("script",), workers_per_node=WORKERS_PER_NODE)
"""For their defaults."""
WAIT_S: Final = 120.0


def play(size: JobSize, store: Address, secret: Secret, begun: Any, over: Any) -> None:
    """The agents of all nodes but the first, in a process of its own, until `over`. `begun`: told when they begin."""
    allow_as_many_as_may_be()
    together = threading.Barrier(size.nodes)  # of them and this thread

    def take_part(node: int) -> None:
        together.wait(WAIT_S)
        joining = Joining(
            node, size, OPTIONS.heartbeat_timeout_s, OPTIONS.heartbeat_s, node * WORKERS_PER_NODE, secret
        )  # fmt: skip
        client = connect(store, secret, WAIT_S)
        connection = join(client, joining, lambda: None)
        over.wait()
        connection.close()

    agents = [threading.Thread(target=take_part, args=(node,), daemon=True) for node in range(1, size.nodes)]
    for agent in agents:
        agent.start()
    begun.set()
    together.wait(WAIT_S)
    over.wait()


def measure(nodes: int, seconds: float) -> dict[str, Any]:
    """Run node 0 here, and the others in a process of their own."""
    allow_as_many_as_may_be()
    size, secret = JobSize(nodes, WORKERS_PER_NODE), fresh_secret()
    listeners = [reserve("127.0.0.1", 0) for _ in range(2)]
    store, liveness = (Address("127.0.0.1", listener.getsockname()[1]) for listener in listeners)
    server = StoreServer(listeners[0], secret)
    watcher = NodeWatcher(listeners[1], secret, size, OPTIONS.heartbeat_timeout_s, time.monotonic() + WAIT_S)
    publish(connect(store, secret, WAIT_S), size, Meeting(liveness, liveness))
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    others = context.Process(target=play, args=(size, store, secret, begun, over), daemon=True)
    others.start()
    if not begun.wait(WAIT_S):
        raise RuntimeError("the process of the other nodes has failed")
    began, used = time.monotonic(), time.process_time()
    lost = _watch(watcher, until=lambda: len(watcher.served) == nodes - 1 or time.monotonic() > began + WAIT_S)
    joined, joined_used, there = time.monotonic(), time.process_time(), len(watcher.served)
    lost += _watch(watcher, until=lambda: time.monotonic() > joined + seconds)
    beating_s, beating_used = time.monotonic() - joined, time.process_time() - joined_used
    over.set()
    others.join(WAIT_S)
    watcher.close()
    server.close()
    return {
        "nodes": nodes, "joined": there + 1, "lost": lost, "join_s": joined - began, "join_cpu_s": joined_used - used,
        "heartbeat_s": OPTIONS.heartbeat_s, "heartbeat_core_percent": 100 * beating_used / beating_s,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def _watch(watcher: NodeWatcher, until: Callable[[], bool]) -> int:
    """Look as an agent's loop does; how many nodes were lost."""
    lost = 0
    with selectors.DefaultSelector() as selector:
        selector.register(watcher, selectors.EVENT_READ)
        while not until():
            selector.select(LOOK_S)
            lost += len(watcher.look(time.monotonic()))
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1250, help="of 8 workers (default 1250: 10,000 workers)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of heartbeats (default 30)")
    options = parser.parse_args()
    result = measure(options.nodes, options.seconds)
    result["load_average"] = load_average()
    if result["join_s"] > GOAL_JOIN_S:
        print(f"to join takes more than {GOAL_JOIN_S:g} s", file=sys.stderr)
    if result["heartbeat_core_percent"] > GOAL_CORE_PERCENT:
        print(f"heartbeats take more than {GOAL_CORE_PERCENT:g} % of a core", file=sys.stderr)
    print_result(result)
    return 0 if result["joined"] == options.nodes and not result["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
