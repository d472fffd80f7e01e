# SPDX-License-Identifier: Apache-2.0
"""`resihp detect`: a recorded run, or a table of times, through the detector."""
