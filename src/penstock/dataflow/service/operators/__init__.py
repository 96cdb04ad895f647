# SPDX-License-Identifier: Apache-2.0
"""Calls of people and their tools: status, report, explain, forget."""
