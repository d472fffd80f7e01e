# SPDX-License-Identifier: Apache-2.0
"""How bytes travel. Decides nothing.

The store that all processes share (`store`), who may connect (`access`), connections that tell of their other end's
death, the way of records to the detector, and a client of etcd (`etcd`).
"""
