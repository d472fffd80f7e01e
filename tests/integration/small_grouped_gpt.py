# SPDX-License-Identifier: Apache-2.0
"""grouped_gpt.py on devices whose memory is that of small_devices_gpt.py."""

import grouped_gpt
import small_devices_gpt

from megatron_resihp.integration.patches import startup

if __name__ == "__main__":
    startup.describe_job = small_devices_gpt.of_small_devices
    grouped_gpt.main()
