"""Nodes: everything other than heads that reads or writes the residual stream."""
