"""Where a run is kept: files behind any URL, checkpoints (Orbax), trajectories (Parquet)."""
