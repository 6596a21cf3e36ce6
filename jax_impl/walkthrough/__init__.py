"""What the notebooks draw and try out, so that their cells only call it: pictures, tables and small experiments.

    show        pictures, tables and sources as a notebook displays them
    overlap     01: columns and windows          rollback    02: acceptance, and commits that go wrong
    frameworks  03: five implementations          planning    04: bytes of published models
    decoding    05: a whole model                 serving     06: steps of an engine

matplotlib, torch and transformers are imported by the functions that need them.
"""
