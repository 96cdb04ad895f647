# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms, one module each: the module's name is `algorithm.name` of a run file.

A module holds the declaration `ALGORITHM` and, where it differs from PPO's, the loss. To add an
algorithm, add one module. Import no torch at module level: checking a run file imports all of them.
"""
