"""The machine: files that are written atomically, threads, memory."""
