"""Runs the command line as `python -m evalstop_client.receivers.cli`."""

import sys

from evalstop_client.receivers.cli import main

sys.exit(main())
