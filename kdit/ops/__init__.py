"""Tensor operators that networks share: attention, linear layers, norms, rotary tables."""
