"""How long tests wait for what must happen: a guard against hanging, never a measure of speed."""

from __future__ import annotations

# A slow machine, or a disk that stalls for seconds, is no failure; pytest's own limit is 300 s.
PATIENCE_S = 60.0
