# SPDX-License-Identifier: Apache-2.0
"""Megatron's side: the only package, beside `cpu`, that imports megatron."""
