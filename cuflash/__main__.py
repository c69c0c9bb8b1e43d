"""``python -m cuflash``: the same as the command ``cuflash``."""

from cuflash.cli import main

raise SystemExit(main())
