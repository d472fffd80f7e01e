# SPDX-License-Identifier: Apache-2.0
"""A laboratory: published detectors and experiments to compare with. A reader of the plugin can pass it by.

Only the `resihp` command and benchmarks import it. May import: every package below it.
"""
