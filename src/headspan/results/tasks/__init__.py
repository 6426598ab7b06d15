"""What task circuits leave behind: the table of edges, attributions, and files of other tools."""
