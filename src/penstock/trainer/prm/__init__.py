# SPDX-License-Identifier: Apache-2.0
"""Process reward models: the text of a step, a regression head on a language model, its scores.

`traces` and `step_text` import no torch; `head`, `training` and `scorer` do."""
