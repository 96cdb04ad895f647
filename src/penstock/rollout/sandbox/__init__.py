# SPDX-License-Identifier: Apache-2.0
"""Runs untrusted code: what a model wrote, tools, graders, commands of workflows."""
