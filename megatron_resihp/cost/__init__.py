"""What work costs: workload features, fitted coefficients, links. Imports numpy and scipy, no torch."""
