# SPDX-License-Identifier: Apache-2.0
"""Whether a node is fit to join a job: its devices, their connections, its disks and its clock."""
