# SPDX-License-Identifier: Apache-2.0
"""`resihp launch`, `apply`, `inject` and `checkpoint`, and what they need of a run directory."""
