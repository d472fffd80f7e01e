# SPDX-License-Identifier: Apache-2.0
"""What Megatron logs for TensorBoard and W&B is sent to node 0. May import megatron and this package."""
