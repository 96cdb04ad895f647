# SPDX-License-Identifier: Apache-2.0
"""Clients of the dataflow service. Imports no storage."""
