"""(6) Is the run healthy: metrics, progress, alerts, the manifest and the report."""
