# SPDX-License-Identifier: Apache-2.0
"""Planning in processes of its own, so that the coordinator goes on meanwhile."""
