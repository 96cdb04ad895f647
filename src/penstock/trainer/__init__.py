# SPDX-License-Identifier: Apache-2.0
"""Turns the sealed batches of one policy into versions. Meets rollouts only in the dataflow."""
