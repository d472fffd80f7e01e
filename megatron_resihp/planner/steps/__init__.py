"""The steps of published planners that several strategies share: groups, migration, repartition, re-routing."""
