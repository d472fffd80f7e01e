# SPDX-License-Identifier: Apache-2.0
"""What NCCL needs beyond torch: aborts all at once, and meetings that can be left."""
