#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with this project and its test tools in it. Finds a Python >= 3.12 by itself. Does nothing, quickly, when
# .venv is up to date. Prints one line and exits non-zero when it cannot.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMP=$VENV/.resihp-setup
readonly COMPILED=$VENV/.resihp-compiled
readonly SUPPORTED='sys.version_info >= (3, 12)'

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

# A version manager's shim can be on PATH and yet run nothing, so ask the interpreter itself.
satisfies() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(not ($2))" >/dev/null 2>&1
}

list_candidates() {
    local name
    for name in python3.12 python3.13 python3; do
        type -P "$name" || true
    done
    local pyenv_versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
    if [[ -d $pyenv_versions ]]; then
        find "$pyenv_versions" -maxdepth 1 -name '3.*' | sort -V -r | sed 's|$|/bin/python3|'
    fi
    if type -P uv >/dev/null; then
        uv python find '>=3.12' 2>/dev/null || true
    fi
}

# 3.12 before anything newer: wheels appear for it first.
find_python() {
    local candidates condition candidate
    candidates=$(list_candidates)
    for condition in 'sys.version_info[:2] == (3, 12)' "$SUPPORTED"; do
        while read -r candidate; do
            if [[ -n $candidate ]] && satisfies "$candidate" "$condition"; then
                echo "$candidate"
                return
            fi
        done <<<"$candidates"
    done
    return 1
}

# What .venv was made for: where (scripts in it hold absolute paths), from which package metadata, with which Python.
fingerprint() {
    echo "root $PWD"
    cksum setup.py
    # Behind the package's metadata are only settings of tools.
    sed '/^\[tool\./q' pyproject.toml | cksum
    grep '^version' "$VENV/pyvenv.cfg"
}

# The sources of the planners' machine code.
loops() {
    find megatron_resihp/pipeline megatron_resihp/planner -name '*.py' -exec cksum {} + | sort
}

# Otherwise the first plan of a job would wait for the compilation.
compile_planners() {
    [[ -f $COMPILED && $(<"$COMPILED") == "$(loops)" ]] && return
    echo "setup.sh: compiling the planners (a minute or two of one core)"
    if "$VENV/bin/python" -m megatron_resihp.planner.practice; then
        loops >"$COMPILED"
    else
        echo "setup.sh: that failed (the message is above); the first command that plans will try again" >&2
    fi
}

if [[ -x $VENV/bin/python && -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
    compile_planners
    exit 0
fi

if [[ -e $VENV ]]; then
    satisfies "$VENV/bin/python" "$SUPPORTED" ||
        fail "$PWD/$VENV has no working Python >= 3.12; remove it (rm -r $VENV) and run this again"
else
    python=$(find_python) ||
        fail "no Python >= 3.12 found on PATH, under pyenv or through uv; install one (pyenv install 3.12) and run this again"
    echo "setup.sh: making $VENV with $python"
    "$python" -m venv "$VENV" ||
        fail "$python cannot make a virtual environment; install its venv module (Debian: python3-venv), rm -rf $VENV and run this again"
fi

echo "setup.sh: installing megatron-resihp and its test tools into $VENV (several GB and some minutes the first time)"
"$VENV/bin/python" -m pip install --quiet --editable '.[train,test]' ||
    fail "pip could not install the packages that pyproject.toml names (its message is above); check the network and the disk, then run this again"
fingerprint >"$STAMP"
compile_planners
