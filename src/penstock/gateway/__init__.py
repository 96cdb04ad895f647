# SPDX-License-Identifier: Apache-2.0
"""Gateway between agents and inference engines. Records every model call token by token."""
