# SPDX-License-Identifier: Apache-2.0
"""The detector's input: workers' records, on the wire, on disk and in tables, joined to iterations."""
