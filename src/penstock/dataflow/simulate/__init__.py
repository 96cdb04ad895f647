# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded run with other data rules: the real core, driven by the record instead of
nodes and trainers."""
