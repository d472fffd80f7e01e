# SPDX-License-Identifier: Apache-2.0
"""The way between devices: what crosses between workers under a heterogeneous plan, in one order that all agree on."""
