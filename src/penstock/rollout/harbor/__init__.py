# SPDX-License-Identifier: Apache-2.0
"""Runs tasks in the Harbor format without Docker: an agent in a sandbox, then the task's verifier
in another."""
