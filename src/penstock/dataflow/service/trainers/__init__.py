# SPDX-License-Identifier: Apache-2.0
"""Calls of trainers: batches, rows, commits, versions, checkpoints."""
