"""`python -m zcompile.cli`, where the script is not on the path."""

import sys

from zcompile.cli import main

sys.exit(main())
