"""`python -m services.decode` starts one decode worker."""

from __future__ import annotations

import sys

from services.decode.main import main

sys.exit(main())
