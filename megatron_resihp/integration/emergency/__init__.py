# SPDX-License-Identifier: Apache-2.0
"""State that survivors save by parameter, and the checkpoint that `resihp emergency` makes of it."""
