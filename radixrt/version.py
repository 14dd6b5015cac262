"""The version of radixrt."""

__version__ = "0.1.0"
