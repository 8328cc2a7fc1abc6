"""Proves from a run's own files what asyncrl promises of it: claims.py has the verdicts, run_files.py reads,
proofs.py makes them all. Nothing here is shared with the code that wrote the files: no import of loop/,
train/, job/, data/ or observe/, and own formulas. Only the choice of experts that an engine recorded is
replayed by the code that recorded it (weights.py)."""
