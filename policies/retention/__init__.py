"""Lifetimes: which keys and values can still be read, where they live and when they die.

Start at `policies.retention.plan` (a program becomes a plan) or `policies.retention.report`
(a model's config becomes a table); docs/retention.md has the whole path.
"""
