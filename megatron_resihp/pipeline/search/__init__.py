# SPDX-License-Identifier: Apache-2.0
"""Searches for a fast pipeline: layers, devices and order of ops, within memory."""
