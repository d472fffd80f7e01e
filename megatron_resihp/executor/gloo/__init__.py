# SPDX-License-Identifier: Apache-2.0
"""Additions to torch's gloo: event loops that end, collectives that can be ended, groups made in advance."""
