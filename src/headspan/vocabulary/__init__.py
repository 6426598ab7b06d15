"""Words that everything else uses: heads, roles, pairings, ports, positions, errors and warnings."""
