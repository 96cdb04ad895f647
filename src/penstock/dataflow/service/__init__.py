# SPDX-License-Identifier: Apache-2.0
"""The dataflow as processes: the core's state machines over a ledger, served by HTTP.

One folder per audience (nodes, trainers, partitions, operators, rows), each with its request and
response bodies (`messages`), its logic (`handlers`) and its HTTP routes (`routes`).
"""
