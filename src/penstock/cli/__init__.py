# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin file per command. Heavy imports happen inside functions."""
