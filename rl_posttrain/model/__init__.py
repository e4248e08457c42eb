"""The policy: plain functions over a nested dict of arrays, declared in one table."""
