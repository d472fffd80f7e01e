# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py on devices whose memory holds half of the experts of `test_uneven_experts.py`, and not all.

Plans take it that the devices have so many bytes; nothing holds a worker to them.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402

from megatron_resihp.integration.patches import startup  # noqa: E402
from megatron_resihp.protocol.job import JobDescription  # noqa: E402

DEVICE: Final = 650_000
"""Bytes. Each of two workers that share all experts needs 620,000, and each of three that have all of them 690,000."""
HOST: Final = 1 << 30
describe_job = startup.describe_job


def of_small_devices(job: Any) -> JobDescription:
    """The job's description, as GPUs of this size would have it."""
    return replace(describe_job(job), device_memory=DEVICE, memory_reserve=0.0, host_memory=HOST)


if __name__ == "__main__":
    startup.describe_job = of_small_devices
    pretrain_gpt.main()
