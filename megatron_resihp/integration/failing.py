# SPDX-License-Identifier: Apache-2.0
"""How a worker ends that can't take part. May import: the standard library and what needs no Megatron."""

import sys
from typing import NoReturn

from megatron_resihp.config import ConfigError
from megatron_resihp.control import exit_codes


def fail(*texts: str) -> NoReturn:
    """End with these lines on stderr and argparse's exit code; the job's end gives the first as its reason."""
    for text in texts:
        print(f"resihp: {text}", file=sys.stderr, flush=True)
    more = f" (and {len(texts) - 1} more, see its log)" if len(texts) > 1 else ""
    raise SystemExit(exit_codes.REFUSED) from ConfigError(texts[0] + more)
