# SPDX-License-Identifier: Apache-2.0
"""Calls of rollout nodes: joining, leases, turns, deliveries."""
