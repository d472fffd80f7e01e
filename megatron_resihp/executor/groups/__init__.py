# SPDX-License-Identifier: Apache-2.0
"""The process groups of an epoch: made, waited in, cut when the epoch breaks, and freed."""
