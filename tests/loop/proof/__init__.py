"""The proof of the loop: books kept apart from it, against which every event of drawn, faulty runs is
checked.

    python -m tests.loop.proof.scenarios SEED [--trace]

replays a seed (`drawing`: what a scenario is; `scenarios`: whole runs; `invariants`: what must hold, by the
watches beside it).
"""
