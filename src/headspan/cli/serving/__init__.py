"""Answer the questions of a program: read-only tools over one folder, by the Model Context Protocol."""
