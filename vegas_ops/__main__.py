"""`python -m vegas_ops`."""

import sys

from vegas_ops.cli import main

sys.exit(main())
