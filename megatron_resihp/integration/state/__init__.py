# SPDX-License-Identifier: Apache-2.0
"""What is trained, as named tensors and slices: moved between workers, compared, and freed."""
