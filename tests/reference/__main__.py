"""``python -m tests.reference``."""

import sys

from tests.reference.cli import main

sys.exit(main())
