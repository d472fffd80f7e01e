# SPDX-License-Identifier: Apache-2.0
"""The consoles that pages and progress bars go to. May import: the standard library and rich."""

from __future__ import annotations

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.progress import Progress

WIDTH: Final = 100


def console_for(stream: TextIO) -> Console:
    """A console of the page's width; rich leaves out colour where `stream` is no terminal."""
    natural = Console(file=stream)
    return Console(file=stream, width=min(WIDTH, natural.width) if natural.is_terminal else WIDTH, highlight=False)


def progress_bar() -> Progress:
    """A progress bar on stderr that disappears at the end; it draws nothing where stderr is no terminal."""
    return Progress(console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
