# SPDX-License-Identifier: Apache-2.0
"""Searching for a fast pipeline: layers, devices and order of ops, under a memory limit."""
