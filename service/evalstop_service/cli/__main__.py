"""The same by `python -m evalstop_service.cli`."""

import sys

from evalstop_service.cli import main

sys.exit(main())
