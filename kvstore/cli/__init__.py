"""`kvstore`, the command line: see `app`."""
