# SPDX-License-Identifier: Apache-2.0
"""What is measured of an iteration, and what slows or ends it on purpose."""
