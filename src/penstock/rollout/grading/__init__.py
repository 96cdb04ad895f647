# SPDX-License-Identifier: Apache-2.0
"""Judges a solution that a model wrote, so that the verdict cannot be forged.

The solution runs in one sandbox and the tests in another. They share no file, process or
descriptor: each call of a test is passed on as plain JSON values by the node between them."""
