"""The paper's evaluation on head classes, and the reproduction of its numbers."""
