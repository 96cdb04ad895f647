# SPDX-License-Identifier: Apache-2.0
"""The built-in compute stages: how a batch's rewards become credit per token.

One module per stage function; the module's name is the function's, and `STAGE` is the function. Run
files name them `penstock.trainer.pipeline.credits:NAME`. To add one, add one module with a declared
function (`penstock.config.builtin_stages`); import no torch at module level. The functions only
join columns to the pure functions of `advantages/`. In all of them a row without a reward gets
advantage 0.

R = rows of the manifest, S = samples, T = tokens of all samples, Q = turns, row after row,
P = roles."""
