# SPDX-License-Identifier: Apache-2.0
"""Calls between the coordinator and partitions in other processes."""
