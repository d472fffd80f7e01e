#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs what needs the engines and networks of a real cluster: a SLURM whose nodes are network namespaces of this machine,
# etcd, nodes that lose each other, coordinators that are lost, strangers, the exhaustive check of the agreement, and a
# death in a job of 10,000 synthetic workers. Needs root. Installs Debian's packages if they are missing.
#   scripts/cluster_tests.sh              all of it
#   scripts/cluster_tests.sh --chaos 100  so many sequences of losses of coordinators, etcd's members, nodes, workers and links
#   scripts/cluster_tests.sh --part 1/3   the first of three parts of about equal length
#   scripts/cluster_tests.sh -k warned    other arguments go to pytest
# The last line is a JSON object; scripts/cluster_figures.py says what is in it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly PACKAGES=(slurmctld slurmd slurm-client munge iproute2 iptables etcd-server)
readonly TESTS=(
    tests/cluster tests/unit/control/model tests/unit/control/transport/test_strangers.py
    tests/unit/benchmarks/test_scale_benchmark.py
    tests/integration/test_{etcd,etcd_access,takeover,control_chaos,coordinator_apart,partition,attacks}.py
)

arguments=()
while (($#)); do
    case $1 in
    --chaos)
        [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "cluster_tests.sh: --chaos needs a number of sequences" >&2; exit 2; }
        export RESIHP_CONTROL_CHAOS=$2
        shift
        ;;
    *) arguments+=("$1") ;;
    esac
    shift
done

bash scripts/setup.sh || exit 1
for program in slurmctld slurmd sbatch munged ip iptables etcd; do
    command -v "$program" >/dev/null && continue
    # The tests start the daemons themselves.
    SYSTEMD_OFFLINE=1 RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --no-install-recommends "${PACKAGES[@]}" || exit 1
    break
done

export OMP_NUM_THREADS=1 RESIHP_NIGHTLY=1
results=$(mktemp)
trap 'rm -f "$results"' EXIT
PYTHONPATH="scripts${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/pytest -p nightly_parts "${TESTS[@]}" --junit-xml "$results" \
    ${arguments[@]+"${arguments[@]}"}
code=$?
.venv/bin/python scripts/cluster_figures.py "$results" || code=1
exit "$code"
