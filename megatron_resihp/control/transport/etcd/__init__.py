# SPDX-License-Identifier: Apache-2.0
"""A client of etcd: where it is (`location`), how it is asked (`gateway`), and one leader at a time (`leadership`).

Over the HTTP gateway that each member of etcd serves beside gRPC. Decides nothing about jobs.
"""
