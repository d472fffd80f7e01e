# SPDX-License-Identifier: Apache-2.0
"""Packs a folder for a GPU machine without a network: this repository, Megatron's wheel and an NCCL that fits.

There: `. BUNDLE/setup.sh`, then `scripts/gpu_check/run`. Imports the standard library only; pip fetches the wheels.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prune_nccl import prune
from setting import REPOSITORY, python

MEGATRON: Final = "megatron-core>=0.19,<0.20"
NCCL: Final = "nvidia-nccl-cu13>=2.30"
LIBRARY: Final = "nvidia/nccl/lib/libnccl.so.2"
SETUP: Final = """\
# Source this in bash, where the GPU is. Unpacks everything next to this file into /tmp/gpu_check.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) && to=/tmp/gpu_check && mkdir -p $to/site $to/nccl || return 1
tar xzf "$here/repository.tar.gz" -C $to || return 1
python3 -m pip install -q --no-index --no-deps --no-compile --target $to/site "$here"/*.whl || return 1
# Megatron runs make for its dataset helper, which the wheel has compiled, but without a Makefile.
echo all: > $to/site/megatron/core/datasets/Makefile || return 1
python3 - "$here/libnccl.so.2.xz" $to/nccl/libnccl.so.2 <<'END' || return 1
import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))
END
export PYTHONPATH=$to/site:$to/repository PYTHONUNBUFFERED=1 LD_PRELOAD=$to/nccl/libnccl.so.2
cd $to/repository
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Pack; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check/prepare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True, help="folder to make")
    parser.add_argument("--limit-mib", type=float, default=64, help="refuse a larger one (default: %(default)g)")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU, 90 for Hopper (default: %(default)s)")
    asked = parser.parse_args(argv)
    asked.bundle.mkdir(parents=True, exist_ok=True)
    try:
        _fill(asked.bundle, asked.architecture)
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(asked.bundle.iterdir())}
    for name, size in sizes.items():
        print(f"{size:8.1f} MiB  {name}")
    if sum(sizes.values()) > asked.limit_mib:
        print(f"prepare: {sum(sizes.values()):.1f} MiB are more than {asked.limit_mib:g}", file=sys.stderr)
        return 1
    return 0


def _fill(bundle: Path, architecture: int) -> None:
    (bundle / "setup.sh").write_text(SETUP)
    archive = ["git", "archive", "--format=tar.gz", "--prefix=repository/", "-o"]
    subprocess.run([*archive, str(bundle.resolve() / "repository.tar.gz"), "HEAD"], cwd=REPOSITORY, check=True)
    with tempfile.TemporaryDirectory() as folder:
        _fetch(MEGATRON, bundle)
        _fetch(NCCL, Path(folder))
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            library = Path(content.extract(LIBRARY, folder))
        small = library.with_name("small")
        prune(library, small, architecture)
        (bundle / "libnccl.so.2.xz").write_bytes(lzma.compress(small.read_bytes()))


def _fetch(requirement: str, folder: Path) -> None:
    command = python("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    subprocess.run([*command, requirement], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
