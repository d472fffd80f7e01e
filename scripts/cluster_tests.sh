#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need a real cluster: a SLURM whose nodes are network namespaces of this machine. Needs root. Installs
# Debian's packages if they are missing.
#   scripts/cluster_tests.sh              all of them
#   scripts/cluster_tests.sh -k warned    other arguments go to pytest
# The last line is a JSON object: `cases`, and how many of them `failed`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly PACKAGES=(slurmctld slurmd slurm-client munge iproute2)

bash scripts/setup.sh || exit 1
if ! command -v slurmctld slurmd sbatch munged ip >/dev/null; then
    # The tests start the daemons themselves.
    SYSTEMD_OFFLINE=1 RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --no-install-recommends "${PACKAGES[@]}" || exit 1
fi

export OMP_NUM_THREADS=1
results=$(mktemp)
trap 'rm -f "$results"' EXIT
.venv/bin/pytest tests/cluster --junit-xml "$results" "$@"
code=$?
.venv/bin/python - "$results" <<'PYTHON'
import json
import sys
from xml.etree import ElementTree

suite = ElementTree.parse(sys.argv[1]).find("testsuite").attrib
skipped = int(suite["skipped"])
if skipped:
    print(f"{skipped} left out: a program is missing, or this is not root", file=sys.stderr)
failed = int(suite["failures"]) + int(suite["errors"])
cases = int(suite["tests"]) - skipped
print(json.dumps({"cases": cases, "failed": failed}))
sys.exit(not cases)
PYTHON
(($? == 0 || code)) || code=1
exit "$code"
