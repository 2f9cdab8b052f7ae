"""`python -m dialoop_ops.stack WORDS` is `dialoop WORDS`, for where that command is not on PATH."""

import sys

from dialoop_ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
