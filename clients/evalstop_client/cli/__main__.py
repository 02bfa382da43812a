"""Runs the command line as `python -m evalstop_client.cli`."""

import sys

from evalstop_client.cli import main

sys.exit(main())
