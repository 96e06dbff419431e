"""A package, so that ``tests.reference`` is this project's and never another one's on the path."""
