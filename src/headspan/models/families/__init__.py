"""The table of model families: tensor names, sizes, norms, and which families are not read."""
