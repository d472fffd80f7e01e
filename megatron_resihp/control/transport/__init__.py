# SPDX-License-Identifier: Apache-2.0
"""How bytes travel. Decides nothing.

The store that all processes share, connections that tell of their other end's death, and the way of records to the
detector.
"""
