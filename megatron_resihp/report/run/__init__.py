# SPDX-License-Identifier: Apache-2.0
"""`resihp report`: what a run's events say, for a terminal, as JSON and as a picture."""
