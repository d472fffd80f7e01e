# SPDX-License-Identifier: Apache-2.0
"""`resihp plan`: the next plan of a job whose workers are dead or slow."""
