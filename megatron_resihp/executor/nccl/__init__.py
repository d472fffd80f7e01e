# SPDX-License-Identifier: Apache-2.0
"""Additions to torch's NCCL: aborts of all groups at once, and communicator creation that can be abandoned."""
