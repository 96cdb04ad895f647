# SPDX-License-Identifier: Apache-2.0
"""Runs code that nobody vouches for: what a model wrote, tools, graders, commands of workflows."""
