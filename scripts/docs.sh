#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the documentation's site from docs/ into build/site, without the network. A link that leads nowhere, or a page that is in no
# menu, is an error. Needs mkdocs: .venv/bin/python -m pip install --editable '.[docs]'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! .venv/bin/python -c 'import mkdocs' 2>/dev/null; then
    echo "docs.sh: mkdocs is not installed; run .venv/bin/python -m pip install --editable '.[docs]'" >&2
    exit 1
fi
exec .venv/bin/python -m mkdocs build --strict --quiet "$@"
