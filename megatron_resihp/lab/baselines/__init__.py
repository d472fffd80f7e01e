# SPDX-License-Identifier: Apache-2.0
"""Published detectors, written from the papers' descriptions, to compare with.

Both look for change points in the job's iteration time and then stop the job to validate, which names the culprit.
Imports numpy, scipy, `cost`, `pipeline` and `detector`.
"""
