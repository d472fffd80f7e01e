# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments: --resihp's own, what each means for a job, and which are refused."""
