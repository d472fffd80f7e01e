# SPDX-License-Identifier: Apache-2.0
# For scripts that run pytest, to be sourced: afterwards `tell_what_was_left_out` names the tests that pytest has skipped,
# and why (tests/conftest.py notes them).
RESIHP_LEFT_OUT=$(mktemp)
export RESIHP_LEFT_OUT
trap 'rm -f "$RESIHP_LEFT_OUT"' EXIT

tell_what_was_left_out() {
    if [[ -s $RESIHP_LEFT_OUT ]]; then
        echo "left out, because something is missing here:"
        sort -u "$RESIHP_LEFT_OUT"
    fi
}
