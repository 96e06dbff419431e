"""ExtraInputs: base of the inputs that one family alone has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExtraInputs:
    """Subclasses live beside their family's ContextBuilder. Every field has a default, and holds only what
    the user gives: text, paths, numbers.
    """
