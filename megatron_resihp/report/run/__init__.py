# SPDX-License-Identifier: Apache-2.0
"""`resihp report`: a summary of a run's events, for a terminal, as JSON and as a picture."""
