"""Tiny random-weight checkpoints of many families, and what diffusers computes from them.

For every family (one pipeline class in one configuration) this package builds a tiny pipeline with
seeded random weights, saves it as an ordinary diffusers folder, loads that folder again, runs a few
cases in float32 on the CPU, and writes each call with every tensor worth comparing. An engine passes
when it loads the same folder, repeats the call and reproduces the tensors. README.md has the layout
on disk and the tolerances.
"""

from tests.reference.environment import prepare

prepare()
