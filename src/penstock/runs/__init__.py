# SPDX-License-Identifier: Apache-2.0
"""Runs as a library: launch, fork, replay, check, watch and read a run.

Parses no arguments, prints nothing and installs no signal handlers; `penstock.cli` does that on
top of it.
"""
