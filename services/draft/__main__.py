"""`python -m services.draft` starts one drafter."""

from __future__ import annotations

import sys

from services.draft.main import main

sys.exit(main())
