# SPDX-License-Identifier: Apache-2.0
"""Published detectors and planners for comparison, written from the papers' descriptions.

Both detectors look for change points in the job's iteration time. After one, they stop the job to validate, which names
the culprit. The planners (`rectangles`, `lazarus`) are for jobs whose replicas share experts or sequences. Others are
in `planner.strategies`. Imports numpy, scipy, `plan`, `cost`, `pipeline`, `planner` and `detector`.
"""
