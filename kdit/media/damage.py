"""What libraries raise over damaged files. Caught where files are read and told as the caller's mistake."""

from __future__ import annotations

import struct
import zlib

DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)
