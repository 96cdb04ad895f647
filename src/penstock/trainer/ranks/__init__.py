# SPDX-License-Identifier: Apache-2.0
"""A trainer of several ranks: who holds which part, draws which rows, and follows whom."""
