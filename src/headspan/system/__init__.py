"""The machine: files that are whole or not there, threads, memory."""
