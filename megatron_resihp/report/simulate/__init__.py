# SPDX-License-Identifier: Apache-2.0
"""`resihp simulate`: strategies in a scenario of failures."""
