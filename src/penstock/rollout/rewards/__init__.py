# SPDX-License-Identifier: Apache-2.0
"""Scores completions with user functions, in worker processes that can be killed."""
