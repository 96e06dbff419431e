"""The version of kdit, read by the build and by everything that signs its results with it."""

__version__ = "0.1.0"
