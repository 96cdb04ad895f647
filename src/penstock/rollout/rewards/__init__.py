# SPDX-License-Identifier: Apache-2.0
"""Scoring of completions by plain functions, in processes that can be killed."""
