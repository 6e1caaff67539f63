"""`python -m services.draft.distill`: what `headrace distill` runs."""

from __future__ import annotations

import sys

from services.draft.distill.command import main

sys.exit(main())
