#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The formatter and the linters, as scripts/test.sh and the pre-commit hook run them: ruff, mypy, the import contracts. All their
# settings are in pyproject.toml. All run even if one fails.
#
#   scripts/lint.sh           checks
#   scripts/lint.sh --fix     formats, and fixes what ruff can
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly BIN=.venv/bin
code=0

run() {
    echo "+ $*"
    "$@" || code=1
}

if [[ ${1:-} == --fix ]]; then
    run "$BIN/ruff" check --output-format concise --fix .
    run "$BIN/ruff" format .
else
    run "$BIN/ruff" check --output-format concise .
    run "$BIN/ruff" format --check .
fi
run "$BIN/mypy" --num-workers 2
run "$BIN/lint-imports" --no-logo
exit "$code"
