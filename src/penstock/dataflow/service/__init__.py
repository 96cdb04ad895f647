# SPDX-License-Identifier: Apache-2.0
"""The dataflow as processes: the machines of the core over a ledger, behind HTTP.

One folder per audience (nodes, trainers, partitions, operators, rows), each with the bodies of its
calls (`messages`), what they do (`handlers`) and where they are (`routes`).
"""
