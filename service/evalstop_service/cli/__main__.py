"""Runs the command line as `python -m evalstop_service.cli`."""

import sys

from evalstop_service.cli import main

sys.exit(main())
