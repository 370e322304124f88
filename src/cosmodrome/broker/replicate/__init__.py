"""Replication as the broker uses it: which tables follow, and how."""
