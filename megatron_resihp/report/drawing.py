# SPDX-License-Identifier: Apache-2.0
"""Reports errors in drawing a picture in one line. May import: the standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def drawing(path: Path, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """A context for code that draws into the file that --plot names; raises errors as the command's own refusal."""
    try:
        yield
    except OSError as error:
        raise refusal(f"{path} cannot be written ({error.strerror}); give --plot another file") from None
    except ValueError as error:
        raise refusal(f"{path} cannot be drawn ({error}); give --plot a name that ends in .png") from None
