# SPDX-License-Identifier: Apache-2.0
"""Logs, metrics as JSON lines, and Prometheus metrics."""
