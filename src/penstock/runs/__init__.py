# SPDX-License-Identifier: Apache-2.0
"""Runs as a library: launch, fork, replay, check and watch a run. Parses no arguments and prints
nothing."""
