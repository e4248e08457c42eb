"""One file per experiment; each returns a ConfigDict from `get_config()`."""
