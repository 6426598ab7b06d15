"""Everything besides heads that reads or writes the residual stream."""
