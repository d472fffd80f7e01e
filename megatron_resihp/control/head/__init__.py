# SPDX-License-Identifier: Apache-2.0
"""What runs on node 0 beside its own workers.

Store and coordinator, the detector's thread, and the door for nodes that come later.
"""
