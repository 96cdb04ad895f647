# SPDX-License-Identifier: Apache-2.0
"""Types of the NumPy arrays that the trainer computes with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
