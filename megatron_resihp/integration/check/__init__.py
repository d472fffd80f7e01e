# SPDX-License-Identifier: Apache-2.0
"""`resihp check`: whether a job would be let in, and what it would survive, told before it is queued."""
