# SPDX-License-Identifier: Apache-2.0
"""The rows of the support table, a module for each subject. They import `notation` only."""
