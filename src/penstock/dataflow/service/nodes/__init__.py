# SPDX-License-Identifier: Apache-2.0
"""Calls of rollout nodes: registration, leases, turns, deliveries."""
