# SPDX-License-Identifier: Apache-2.0
"""The error for an impossible plan. Imports nothing."""


class PlanError(ValueError):
    """A plan that breaks a rule; the message names the rule."""
