# SPDX-License-Identifier: Apache-2.0
"""Where the workers of a job can be reached, and which of their machines answer.

May import `control.transport.address` and this package's other modules.
"""

from collections.abc import Callable, Iterable

from megatron_resihp.control import keys
from megatron_resihp.control.transport.address import Address, parse_address
from megatron_resihp.control.worker.channel import Channel
from megatron_resihp.control.worker.reach import unreachable


class Doors:
    """The doors (`reach.Door`) of the other workers, as one worker knows them.

    Args:
        worker: this worker's id.
        node_of: tells a worker's node.
    """

    def __init__(self, channel: Channel, worker: int, node_of: Callable[[int], int]) -> None:
        self._channel = channel
        self._worker = worker
        self._node_of = node_of
        self._addresses: dict[int, Address] = {}
        self._reached: set[str] = set()

    @property
    def known(self) -> frozenset[int]:
        """Workers that `silent` has looked for; one that is still starting has no door yet."""
        return frozenset(self._addresses)

    def silent(self, workers: Iterable[int]) -> list[int]:
        """The workers whose machines could be reached from here before and can't now. Takes seconds; for any thread.

        A machine that has never answered may be behind a firewall that lets communicators through.

        Raises:
            JobEnded: the coordinator is gone.
        """
        wanted = [worker for worker in workers if worker != self._worker]
        for worker in wanted:
            if worker not in self._addresses:
                address = self._channel.published(f"{keys.KNOCK_AT}{worker}")
                if address is not None:
                    self._addresses[worker] = parse_address(address)
        known = {worker: self._addresses[worker] for worker in wanted if worker in self._addresses}
        missed = unreachable(known)
        self._reached |= {known[worker].host for worker in known.keys() - set(missed)}
        return [worker for worker in missed if known[worker].host in self._reached]

    def one_of_each_node(self, workers: Iterable[int]) -> list[int]:
        """One of these workers on each of the other nodes that are this worker's to look for.

        Those on its own node share the other nodes by their numbers. So all are looked for, and the loss of one changes
        nobody's share: a worker that is new to a node can't tell whether that has ever answered. Each node knocks at a
        door of its own, so that thousands of workers don't all knock at one.
        """
        nodes: dict[int, list[int]] = {}
        for worker in sorted(workers):
            nodes.setdefault(self._node_of(worker), []).append(worker)
        own = self._node_of(self._worker)
        here = nodes.pop(own, [])
        shared = here if self._worker in here else [self._worker]
        return [
            there[own % len(there)]
            for node, there in sorted(nodes.items())
            if shared[node % len(shared)] == self._worker
        ]

    def cut_off(self, workers: Iterable[int]) -> list[int]:
        """Those of these workers whose nodes are `silent`, of the nodes that are this worker's to look for.

        Raises:
            JobEnded: as of `silent`.
        """
        workers = list(workers)
        nodes = {self._node_of(worker) for worker in self.silent(self.one_of_each_node(workers))}
        return [worker for worker in workers if self._node_of(worker) in nodes]
