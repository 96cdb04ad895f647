# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin file per command; what is heavy is imported inside functions."""
