# SPDX-License-Identifier: Apache-2.0
"""Steps of published planners that several strategies share: groups, migration, repartition, re-routing."""
