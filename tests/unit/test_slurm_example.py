"""The example for SLURM starts launchers that have all that they need. SLURM's own commands are made up here."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from megatron_resihp.control.launch_options import add_arguments, check, options_of

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "scontrol": "echo node0; echo node1",
    # As SLURM does for the task on the second node.
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "resihp": 'printf "%s\\n" "$@"',
}


def test_every_node_gets_a_launcher_of_one_job(tmp_path: Path) -> None:
    for name, does in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "RESIHP_BIN": str(tmp_path), "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    command = ["bash", ROOT / "scripts" / "slurm.sbatch", "data/prefix"]
    told = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=30.0, check=True)
    subcommand, *arguments = told.stdout.splitlines()
    assert subcommand == "launch"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = options_of(parser.parse_args(arguments))
    check(options)
    assert (options.nodes, options.node, options.workers_per_node) == (2, 1, 8)
    assert options.coordinator == ("node0", 29400) and options.run_dir == ROOT / "resihp-runs" / "slurm-7"
    assert "--resihp" in options.command and "--eval-interval" in options.command
