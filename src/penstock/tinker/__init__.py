# SPDX-License-Identifier: Apache-2.0
"""A server of the public Tinker API over penstock's trainer, engine and ledger database."""
