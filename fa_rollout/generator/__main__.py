"""`python -m fa_rollout.generator`; see `main`."""

import sys

from fa_rollout.generator.main import main

sys.exit(main())
