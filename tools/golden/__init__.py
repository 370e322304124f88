"""Records the fixtures of `tests/golden` from the real Java system: `python -m tools.golden`."""
