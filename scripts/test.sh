#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks everything: set-up, formatter and linters (scripts/lint.sh), then the unit tests, the integration tests, and some
# on a real SLURM (scripts/cluster_tests.sh runs all of those).
# Arguments go to pytest: scripts/test.sh -k store, scripts/test.sh tests/unit. With --coverage in front the unit tests are counted, which
# takes longer, and the share of lines and branches that they run is printed. With --megatron 0.18 in front the newest patch
# release of that one is laid over .venv's, in build/megatron-0.18. All steps run even if one fails, so that one
# run shows all there is to fix; the exit code is non-zero if any failed. The last lines name tests that were left out
# because a program or a variable is missing. Tests for the night are left out, too: scripts/nightly.sh runs those.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# Several training processes share few cores in the integration tests; one thread each is fastest.
export OMP_NUM_THREADS=1

readonly BIN=.venv/bin
failed=()
coverage=()
release=
if [[ ${1:-} == --megatron ]]; then
    release=${2:?the release, such as 0.18}
    shift 2
fi
if [[ ${1:-} == --coverage ]]; then
    shift
    coverage=(--cov --cov-report=term)
fi

run() {
    echo "+ $*"
    "$@" || failed+=("$(basename "$1")")
}

# Python looks there first. Another release needs nothing that .venv lacks.
lay_over() {
    local place=$PWD/build/megatron-$1
    if [[ ! -d $place ]]; then
        "$BIN/python" -m pip install --quiet --no-deps --target "$place.part" "megatron-core==$1.*" || return
        mv "$place.part" "$place"
    fi
    export PYTHONPATH=$place${PYTHONPATH:+:$PYTHONPATH} RESIHP_TRY_MEGATRON=1
}

bash scripts/setup.sh || exit 1
[[ -z $release ]] || lay_over "$release" || exit 1
# shellcheck source=scripts/left_out.sh
source scripts/left_out.sh

run scripts/lint.sh
if (($#)); then
    run "$BIN/pytest" "${coverage[@]}" "$@"
else
    # A file of tests stays in one process, so its shared fixtures are made once. A test that takes too long is
    # interrupted, because the other way ends the process, and the test would be repeated.
    run "$BIN/pytest" tests/unit "${coverage[@]}" --numprocesses auto --dist loadfile --timeout-method signal
    # These start as many processes as there are cores themselves.
    run "$BIN/pytest" tests/integration
    # On a SLURM of network namespaces, where its programs are installed and this is root.
    run "$BIN/pytest" tests/cluster
fi

tell_what_was_left_out
if ((${#failed[@]})); then
    echo "test.sh: FAILED: ${failed[*]}" >&2
    exit 1
fi
