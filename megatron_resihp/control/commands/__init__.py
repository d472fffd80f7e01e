"""`resihp launch`, `apply`, `drill` and `salvage`, and what they need of a run directory."""
