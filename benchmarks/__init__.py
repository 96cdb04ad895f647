# SPDX-License-Identifier: Apache-2.0
"""Measured promises: each module is one command, `python -m benchmarks.NAME [--quick]`, whose last
line on stdout is one JSON object. Progress goes to stderr."""
