# SPDX-License-Identifier: Apache-2.0
"""Published detectors for comparison, written from the papers' descriptions.

Both look for change points in the job's iteration time. After one, they stop the job to validate, which names the
culprit. Imports numpy, scipy, `cost`, `pipeline` and `detector`.
"""
