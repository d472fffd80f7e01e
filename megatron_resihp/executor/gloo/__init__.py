# SPDX-License-Identifier: Apache-2.0
"""What gloo needs beyond torch: loops that end, collectives that can be woken, groups made ahead."""
