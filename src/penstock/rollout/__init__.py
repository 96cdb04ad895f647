# SPDX-License-Identifier: Apache-2.0
"""A rollout node: lease slots, run the workflow, score, deliver.

This module imports nothing, so that worker processes start fast.
"""
