# SPDX-License-Identifier: Apache-2.0
"""What is raised for a plan that can't be. Imports nothing."""


class PlanError(ValueError):
    """A plan that breaks a rule; the message names the rule."""
