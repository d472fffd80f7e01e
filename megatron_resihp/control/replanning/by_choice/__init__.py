# SPDX-License-Identifier: Apache-2.0
"""Changes of plan without a death: when another plan would be faster, how long to wait for it, and whether it paid."""
