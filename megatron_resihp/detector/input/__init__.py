# SPDX-License-Identifier: Apache-2.0
"""What the detector sees: records of workers, on the wire, on disk and in tables, joined to iterations."""
