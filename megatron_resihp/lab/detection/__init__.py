# SPDX-License-Identifier: Apache-2.0
"""Synthetic jobs and series whose truth is known, and scores of detectors on them.

A job is made of `shapes` (what the healthy ops of a published model cost), `simulator.documents` (what each micro-batch
holds), `noise` and `faults`; `jobs` puts them together and `draws` draws them by seed. Imports numpy, `plan`,
`pipeline`, `cost`, `detector`, `simulator` and `lab.baselines`.
"""
