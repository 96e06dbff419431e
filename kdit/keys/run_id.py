"""RunId: the scope of every tensor. One run is one ``generate`` call or one served request."""

from typing import NewType

RunId = NewType("RunId", str)

MAIN = RunId("main")
