"""One file per ablation; each returns a mapping from `get_sweep()` (docs/sweeps.md)."""
