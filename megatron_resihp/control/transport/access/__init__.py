# SPDX-License-Identifier: Apache-2.0
"""Who may connect, and who may say what: the run's secret, its proof, TLS, and senders of messages."""
