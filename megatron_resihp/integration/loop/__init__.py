# SPDX-License-Identifier: Apache-2.0
"""The training loop of a worker: iterations, recoveries, changes of plan, and how a job ends."""
