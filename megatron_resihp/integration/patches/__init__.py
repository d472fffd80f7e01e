# SPDX-License-Identifier: Apache-2.0
"""What --resihp replaces in Megatron: its flags, start-up, counters, data loaders, checkpoints and schedule."""
