# SPDX-License-Identifier: Apache-2.0
"""Processes on machines: run folders, lists of services, launchers. Starts commands, not
objects."""
