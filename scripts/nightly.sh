#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that are too many for every day: those marked `nightly`.
#   scripts/nightly.sh                all of them
#   scripts/nightly.sh --part 2/6     the second of six parts of about equal length
#   scripts/nightly.sh --list --part 1/6     what is in each of six parts; runs nothing
#   scripts/nightly.sh --record       also note how long each test takes, in tests/nightly_seconds.new.json. Once all parts
#                                     have run, move it to tests/nightly_seconds.json, by which parts are cut
# Other arguments go to pytest. The last lines name what was left out because a program or a variable is missing; the exit
# code is non-zero if a test failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export OMP_NUM_THREADS=1 RESIHP_NIGHTLY=1

bash scripts/setup.sh || exit 1
# shellcheck source=scripts/left_out.sh
source scripts/left_out.sh

PYTHONPATH="scripts${PYTHONPATH:+:$PYTHONPATH}" .venv/bin/pytest -p nightly_parts tests/unit tests/integration -m nightly "$@"
code=$?
tell_what_was_left_out
((code == 0)) || echo "nightly.sh: FAILED" >&2
exit "$code"
