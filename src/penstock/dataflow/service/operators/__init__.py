# SPDX-License-Identifier: Apache-2.0
"""Calls of operators and their tools: status, report, explain, forget."""
