# SPDX-License-Identifier: Apache-2.0
"""The web dashboard: reads runs, live or finished, and shows them in a browser. Changes nothing."""
