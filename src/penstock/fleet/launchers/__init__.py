# SPDX-License-Identifier: Apache-2.0
"""Ways to start the processes of a run, one module each."""
