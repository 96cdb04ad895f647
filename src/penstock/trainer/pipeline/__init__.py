# SPDX-License-Identifier: Apache-2.0
"""What a trainer does with a batch, as a graph of stages: planned, drawn, and run in order."""
