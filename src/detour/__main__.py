"""`python -m detour` is `detour`."""

from detour.cli import main

raise SystemExit(main())
