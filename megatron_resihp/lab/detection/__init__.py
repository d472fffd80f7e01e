# SPDX-License-Identifier: Apache-2.0
"""Synthetic jobs and series with known truth, and scores of detectors on them.

A job combines `shapes` (costs of a published model's healthy ops), `simulator.documents` (workloads of micro-batches),
`noise` and `faults`. `jobs` combines them, and `draws` draws jobs by seed. Imports numpy, `plan`, `pipeline`, `cost`,
`detector`, `simulator` and `lab.baselines`.
"""
