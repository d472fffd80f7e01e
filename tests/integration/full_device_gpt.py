# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py on a device that is as small as its model: what digests take beside it is, too.

Digests take some hundred megabytes of a device, whatever the model. The models of these tests are a thousandth of a
real one, and so is what digests take here. With the file RUN_DIR/wishes/optimist the estimate of what new objects need
is 0 bytes.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402

from megatron_resihp.executor import digest  # noqa: E402
from megatron_resihp.integration.loop import making_room  # noqa: E402
from megatron_resihp.integration.state.room import Room  # noqa: E402

if __name__ == "__main__":
    digest.CHUNK >>= 10
    if (Path(os.environ["RESIHP_RUN_DIR"]) / "wishes" / "optimist").exists():
        making_room.Room = lambda new, *others: Room(0, *others)  # type: ignore[misc, assignment]
    pretrain_gpt.main()
