"""What work costs: workload features, fitted coefficients, links, layers, memory. Imports numpy and scipy, no torch."""
