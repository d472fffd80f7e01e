"""`resihp simulate`: strategies in a scenario of failures."""
