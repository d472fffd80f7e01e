"""What if: synthetic jobs with known faults, failure traces and published scenarios.

A synthetic job is made of `shapes` (what the healthy ops of a published model cost), `documents` (what each micro-batch
holds), `noise` and `faults`; `jobs` puts them together and `draws` draws them by seed. Imports numpy, `plan`,
`pipeline`, `cost` and `detector`.
"""
