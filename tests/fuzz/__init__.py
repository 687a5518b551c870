"""What strangers may write, thrown at the parsers. `documents.py` is the command.

Each target takes any bytes, and raises only if kvstore did what it must not.
"""
