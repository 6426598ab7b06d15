"""What task circuits leave behind: the table of edges, attributions, examples, and files of other tools."""
