# SPDX-License-Identifier: Apache-2.0
"""What is planned after a death: uniform plans of what survivors hold, a strategy's plan, or fewer replicas."""
