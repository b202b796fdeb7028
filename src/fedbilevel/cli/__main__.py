"""Run the command line as `python -m fedbilevel.cli`."""

import sys

from fedbilevel.cli import main

sys.exit(main())
