# SPDX-License-Identifier: Apache-2.0
"""penstock: reinforcement learning of language-model agents as a flow of data.

Importing this package imports nothing else; torch in particular stays out until a trainer or an
in-process engine starts.
"""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
