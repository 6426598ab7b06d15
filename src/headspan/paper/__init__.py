"""The paper's evaluation on head classes, and its numbers computed again."""
