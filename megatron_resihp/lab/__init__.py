# SPDX-License-Identifier: Apache-2.0
"""A laboratory: published detectors and experiments for comparison. Readers of the plugin can skip it.

Only the `resihp` command and benchmarks import it. It may import every package below it.
"""
