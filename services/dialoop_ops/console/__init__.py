"""The console: one local page over finished and running runs, and the JSON that it reads.

Directories of runs enter; GET answers leave. POST puts dead letters back and pauses training, on
the stack that serves the run; nothing else changes a run. The page is built from `console/` at the
repository's root (`make console`) and lies in `page/`.
"""
