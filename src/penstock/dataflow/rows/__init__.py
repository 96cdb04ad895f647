# SPDX-License-Identifier: Apache-2.0
"""Rows for any program: put and get by key, columns, readers that stream them, spaces."""
