# SPDX-License-Identifier: Apache-2.0
"""Rows for any program: columns, readers that stream them, spaces."""
