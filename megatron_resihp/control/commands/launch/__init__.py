# SPDX-License-Identifier: Apache-2.0
"""`resihp launch`: its options and torchrun's, where nodes meet, and the run directory that one job has at a time."""
