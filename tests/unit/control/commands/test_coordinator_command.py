# SPDX-License-Identifier: Apache-2.0
"""`resihp coordinator`: what it is told, what it refuses in one line, and how node 0 finds out that it is apart."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from served import CONNECT_S

from megatron_resihp.cli import command_parser, main
from megatron_resihp.control import keys
from megatron_resihp.control.commands.contact import Contact
from megatron_resihp.control.commands.coordinator_command import options_of
from megatron_resihp.control.commands.launch.claim import Owner
from megatron_resihp.control.commands.launch.launch_options import LaunchError, LaunchOptions
from megatron_resihp.control.commands.launch.launcher import NoEvents
from megatron_resihp.control.commands.launch.seat import Seat, take_seat
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.secret import VARIABLE
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.node_liveness import publish
from megatron_resihp.control.transport.store.client import connect
from megatron_resihp.control.transport.store.server import StoreServer

ELSEWHERE = Address("192.0.2.1", 29400)
"""An address that is kept for documentation."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["coordinator", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("resihp: ") and captured.err.count("\n") == 1 and "; " in captured.err
    return captured.err


def test_what_it_is_told() -> None:
    arguments = ["--nnodes", "2:3", "--nproc-per-node", "4", "--listen", "login:6000", "--connect-timeout", "7200"]
    options = options_of(command_parser().parse_args(["coordinator", *arguments, "--run-dir", "run"]))
    assert options.size == JobSize(2, 4, late_nodes=1, apart=True) and not options.size.head
    assert (options.coordinator, options.run_dir) == (Address("login", 6000), Path("run"))
    assert (options.connect_timeout_s, options.survivor_timeout_s) == (7200.0, LaunchOptions.survivor_timeout_s)
    default = options_of(command_parser().parse_args(["coordinator", "--nnodes", "1", "--run-dir", "run"]))
    assert default.coordinator == Address(socket.gethostname(), 29400)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "0"], "--nnodes 0 is not a job; give 1 or more nodes to begin with"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0 starts no worker; give 1 or more"),
        (["--listen", "here"], "--listen 'here' is not host:port"),
        (["--listen", "192.0.2.1:29400"], "192.0.2.1 is not an address of this machine; give one that is"),
        (["--min-workers", "3"], "--min-workers 3 is invalid; give 1 to 2, the workers at the start"),
        (["--connect-timeout", "0"], "--connect-timeout 0 is invalid; give more than 0"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str) -> None:
    usual = ["--nnodes", "2", "--run-dir", str(tmp_path / "run"), "--listen", f"127.0.0.1:{free_port()}"]
    assert said in refused(capsys, *usual, *arguments)
    assert not (tmp_path / "run").exists()


def test_an_address_that_is_taken_and_a_run_directory_in_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def said(port: int) -> str:
        return refused(capsys, "--nnodes", "2", "--run-dir", str(tmp_path), "--listen", f"127.0.0.1:{port}")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot serve the store on port {port} (Address already in use); check --listen" in said(port)
    with Contact(Address("127.0.0.1", 1)).published(tmp_path):
        assert f"a job runs in {tmp_path} already, launched by {Owner.this()}; give another --run-dir" in said(
            free_port()
        )


def test_a_secret_that_is_too_short(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    said = refused(capsys, "--nnodes", "2", "--run-dir", str(tmp_path), "--listen", f"127.0.0.1:{free_port()}")
    assert f"{VARIABLE} has 5 characters; give 16 or more" in said


def seat_of(options: LaunchOptions, stack: ExitStack) -> Seat:
    return take_seat(options, lambda run_dir: NoEvents(), stack)


def alone(run_dir: Path, **options: int) -> LaunchOptions:
    return LaunchOptions(
        (), alone=True, coordinator=Address("127.0.0.1", 0), run_dir=run_dir, **{"nodes": 2, **options}
    )


def serve(seat: Seat, stack: ExitStack) -> None:
    """As `Headquarters` begins."""
    assert seat.listener is not None
    stack.enter_context(closing(StoreServer(seat.listener, seat.secret)))
    store = stack.enter_context(closing(connect(seat.address, seat.secret, CONNECT_S)))
    publish(store, seat.size, None)
    store.set(keys.RUN, seat.token)


@pytest.mark.parametrize("node", [0, 1])
def test_every_node_joins_a_coordinator_that_is_apart(tmp_path: Path, node: int) -> None:
    with ExitStack() as stack:
        leading = seat_of(alone(tmp_path), stack)
        assert leading.leads and not leading.numbers
        assert json.loads((tmp_path / "coordinator.json").read_text())["apart"] is True
        serve(leading, stack)
        options = LaunchOptions(("x.py",), nodes=2, node=node, coordinator=leading.address, run_dir=tmp_path)
        seat = seat_of(options, stack)
        assert not seat.leads and list(seat.numbers) == [node]
        assert seat.size.apart and not seat.size.head and seat.secret == leading.secret


def test_node_0_of_a_job_of_another_size_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        leading = seat_of(alone(tmp_path), stack)
        serve(leading, stack)
        options = LaunchOptions(("x.py",), nodes=3, coordinator=leading.address, run_dir=tmp_path)
        with pytest.raises(LaunchError, match="started with --nnodes 2 --nproc-per-node 1; give node 0 the same"):
            seat_of(options, stack)


def test_node_0_without_a_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_resihp.control.commands.launch.admission.SEEN_WITHIN_S", 0.0)
    with ExitStack() as stack:
        leading = seat_of(alone(tmp_path), stack)
        serve(leading, stack)
        (tmp_path / "secret").unlink()
        options = LaunchOptions(("x.py",), nodes=2, coordinator=leading.address, run_dir=tmp_path)
        with pytest.raises(LaunchError, match=f"be the job's user, or give it in {VARIABLE}"):
            seat_of(options, stack)


def test_node_0_waits_for_a_coordinator_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for none without a run directory to share with it."""
    monkeypatch.setattr("megatron_resihp.control.transport.sockets.PROBE_PERIOD_S", 1.0)
    options = LaunchOptions(("x.py",), nodes=2, coordinator=ELSEWHERE, run_dir=tmp_path, connect_timeout_s=0.1)
    with ExitStack() as stack:
        with pytest.raises(LaunchError, match=r"nothing answers at 192\.0\.2\.1:29400 .*resihp coordinator there"):
            seat_of(options, stack)
        with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is not an address of this machine"):
            seat_of(LaunchOptions(("x.py",), coordinator=ELSEWHERE), stack)


def test_a_second_node_0_is_refused_where_the_first_has_the_coordinator(tmp_path: Path) -> None:
    """Its own machine is another one, as `apart` in the contact's file would make it believe."""
    with ExitStack() as stack:
        leading = seat_of(
            LaunchOptions(("x.py",), nodes=2, coordinator=Address("127.0.0.1", 0), run_dir=tmp_path), stack
        )
        serve(leading, stack)
        path = tmp_path / "coordinator.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"apart": True}))
        options = LaunchOptions(("x.py",), nodes=2, coordinator=leading.address, run_dir=tmp_path)
        with pytest.raises(LaunchError, match="runs there, with the coordinator; give another --node-rank"):
            seat_of(options, stack)
