"""Pure numpy: bases, principal angles, the projection kernel, random subspaces and sketches."""
