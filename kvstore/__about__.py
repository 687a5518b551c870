"""The version, for the package, its metadata and what it records."""

__version__ = "0.1.0"
