# SPDX-License-Identifier: Apache-2.0
"""A constant advantage."""

from __future__ import annotations

import numpy as np

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.pipeline.layout import Columns, Layout


@stage_function(writes={"advantage": Axis.TOKEN}, is_by_group=True)
def no_advantage(layout: Layout) -> Columns:
    """1 on every trained token, for losses that take their credit from elsewhere (a teacher)."""
    return {"advantage": layout.mask_T.astype(np.float64)}


STAGE = no_advantage
