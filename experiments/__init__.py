"""Commands: each module is a `python -m experiments.<name>`."""
