# SPDX-License-Identifier: Apache-2.0
"""The durable dataflow service: the ledger between rollout nodes and trainers."""
